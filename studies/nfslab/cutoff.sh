#!/bin/sh
# A writer is cut off, killed or stopped at a chosen system call within its commit, and a successor takes over. Plain SQLite, one file with
# its locks, loses acknowledged rows. A study must not. ROUNDS is the number of rounds. With SHORT, two scenarios are left out.
. /payload/lib.sh
TAKEOVER=20s # longer than the NFS lease

# lost NODE succeeds if a plain successor on the node finds that acknowledged rows are lost.
lost() {
  cat /tmp/*.acks >/tmp/all
  on "$1" env STUDIES_TEST_ROLE=plain-verify STUDIES_TEST_CHILD_DIR=$DIR $T </tmp/all >/tmp/verify.log 2>&1
  end="$(tail -n 1 /tmp/verify.log)"
  [ ! -s /tmp/a.err ] || end="$end; the writer: $(said a)"
  clean
  grep -q ^lost /tmp/verify.log
}

# shown SCENARIO: the scenario must lose rows in one of three tries. A client chooses the order in which it sends its writes when its network
# is back, so not every try loses rows.
shown() {
  for TRY in 1 2 3; do
    if $1; then ok "$NAME: $end, at try $TRY"; return; fi
    echo "again: $NAME: $end"
  done
  fail "$NAME: plain SQLite lost no row in three tries"
}

plain_stale_journal() { # the journal of a writer that was cut off arrives when its successor is done
  NAME="plain SQLite, stale journal" DIR=/mnt/nfs/plain1-$ROUND-$TRY
  export STUDIES_TEST_JOURNAL="PERSIST&_locking_mode=EXCLUSIVE" # as a study's own database
  start a plain-write a STUDIES_TEST_PAUSE=journal:0:$HALT-a; A=$PID
  more a 12 60; halted a a; partition a; rm $HALT-a
  start b plain-write b STUDIES_TEST_COMMITS=3
  ends $PID 90; heal a; ends $A 90
  [ "$(acks b)" = 12 ] || echo "$NAME: b: $(said b)"
  lost b
}

plain_hidden_journal() { # by the cache of node b there is no journal
  NAME="plain SQLite, hidden journal" DIR=/mnt/nfs/plain2-$ROUND-$TRY
  export STUDIES_TEST_JOURNAL=DELETE
  start a plain-write a STUDIES_TEST_COMMITS=3; ends $PID 30
  start b plain-write b STUDIES_TEST_COMMITS=1; ends $PID 30
  start a plain-write a2 STUDIES_TEST_COMMITS=1; ends $PID 30
  start b plain-count count; ends $PID 30
  touch $HALT-a; start a plain-write a3 STUDIES_TEST_PAUSE=page:5:$HALT-a; A=$PID
  halted a3 a; killed $A
  lost b
}

plain_journal_removed() { # a writer that was cut off removes its successor's journal
  NAME="plain SQLite, removed journal" DIR=/mnt/nfs/plain3-$ROUND-$TRY
  export STUDIES_TEST_JOURNAL=DELETE
  start a plain-write a STUDIES_TEST_PAUSE=commit:0:$HALT-a; A=$PID
  waits a ack 60; halted a a; partition a
  start b plain-write b STUDIES_TEST_PAUSE=page:5:$HALT-b; B=$PID
  waits b ack 90; halted b b; heal a; rm $HALT-a; ends $A 90
  killed $B
  lost b
}

# kept NODE FIGURES: a successor on the node must find all acknowledged probes.
kept() {
  cat /tmp/*.acks >/tmp/all
  if on "$1" env STUDIES_TEST_ROLE=verify STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=$TAKEOVER $T </tmp/all >/tmp/verify.log 2>&1; then
    ok "$NAME: $2; $(tail -n 1 /tmp/verify.log)"
  else
    fail "$NAME: $2; $(tail -n 3 /tmp/verify.log)"
  fi
}

reading() { start b read reader; READER=$PID; waits reader "reads" 60; }

# read_well: the reader on node b must still run, without an error.
read_well() {
  if kill -0 "$READER" 2>/dev/null && ! grep -q FAIL /tmp/reader.err; then reads="$(grep -c reads, /tmp/reader.acks) reads"; else fail "$NAME: reader: $(said reader)"; fi
  killed "$READER"
}

# superseded LOG ACKS: the old owner must have ended, with no more than ACKS acknowledged probes.
superseded() { [ "$(acks "$1")" = "$2" ] || fail "$NAME: $1 acknowledged $(($(acks "$1") - $2)) after it was superseded"; }

# hot: the halted writer must have left a journal on the server that has a transaction to roll back.
hot() {
  srv sh -c "for j in /srv/export/${DIR##*/}/e*/study.db-journal; do od -A n -t x1 -N 4 \$j; done" | grep -q "d9 d5 05 f9" ||
    fail "$NAME: there is no hot journal, so the scenario tests nothing"
}

# outrun LOG: the slot of its successor must have ended the old owner.
outrun() { grep -q "another tuner owns this study: pid .* on node-b" "/tmp/$1.err" || fail "$NAME: $1 ended otherwise: $(said "$1")"; }

# A study's owner gives up after half of --takeover-after. With ten minutes only its successor's slots end it.
PATIENT=STUDIES_TEST_TAKEOVER=10m

cut_off() { # POINT [PAGE]: the owner is cut off at this point, taken over, and connected again
  NAME="cut off at its $1" DIR=/mnt/nfs/study-$1-$ROUND
  start a write a $PATIENT STUDIES_TEST_PAUSE="$1:${2:-0}:$HALT-a"; A=$PID
  waits a ack 60; reading; halted a a; [ "$1" = journal ] || hot; n=$(acks a)
  partition a; t=$(now); rm $HALT-a
  start b write b; B=$PID
  waits b ack 90; over="taken over from $t to $(now)"
  heal a; ends $A 90; superseded a "$n"; end=$(said a)
  more b 3 60; killed $B; read_well
  kept a "$over, $reads, then: $end"; clean
}

cut_off_journal() { cut_off journal; }
cut_off_page() { cut_off page $((2 + (ROUND - 1) % 2)); } # before the second page, or the third

cut_off_commit() { # the owner is connected again while its successor is in the middle of a commit; then the successor is killed
  NAME="cut off at its commit" DIR=/mnt/nfs/study-commit-$ROUND
  start a write a $PATIENT STUDIES_TEST_PAUSE="commit:0:$HALT-a"; A=$PID
  waits a ack 60; reading; halted a a; hot; n=$(acks a)
  partition a; t=$(now)
  start b write b STUDIES_TEST_PAUSE="page:2:$HALT-b"; B=$PID
  waits b ack 90; over="taken over from $t to $(now)"
  halted b b; heal a; rm $HALT-a; ends $A 90; superseded a "$n"; outrun a; end=$(said a)
  killed $B; read_well
  kept b "$over, $reads, then: $end"; clean
}

stopped() { # no node is cut off, so the old owner keeps its locks and its NFS lease
  NAME="stopped at its commit" DIR=/mnt/nfs/study-stopped-$ROUND
  start a write a $PATIENT STUDIES_TEST_PAUSE="commit:0:$HALT-a"; A=$PID
  waits a ack 60; reading; halted a a; hot; n=$(acks a)
  kill -STOP $A; t=$(now); rm $HALT-a
  start b write b; B=$PID
  waits b ack 90; over="taken over from $t to $(now)"
  kill -CONT $A; ends $A 60; superseded a "$n"; outrun a; end=$(said a)
  more b 3 60; killed $B; read_well
  kept a "$over, $reads, then: $end"; clean
}

hidden_journal() { # the owner is killed between two pages; the other node has read the study and its journal seconds before
  NAME="killed between two pages" DIR=/mnt/nfs/study-hidden-$ROUND
  start a write a; A=$PID; waits a ack 60; killed $A
  on b env STUDIES_TEST_ROLE=verify STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=$TAKEOVER $T </dev/null >/dev/null
  start a write a2 STUDIES_TEST_PAUSE=page:2:$HALT-a; A=$PID
  waits a2 ack 60; reading; on b sh -c "cat $DIR/e*/study.db* >/dev/null"
  halted a2 a; hot; killed $A; t=$(now); read_well
  kept b "taken over from $t to $(now), $reads"; clean
}

ROUND=1
while [ $ROUND -le "${ROUNDS:-1}" ]; do
  shown plain_stale_journal
  [ -n "${SHORT:-}" ] || { cut_off_journal; cut_off_page; }
  shown plain_hidden_journal; hidden_journal
  shown plain_journal_removed; cut_off_commit
  stopped
  ROUND=$((ROUND + 1))
done
exit $bad
