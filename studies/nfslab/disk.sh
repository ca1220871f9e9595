#!/bin/sh
# The server's disk is full, or the study's directory is replaced under its owner.
. /payload/lib.sh
EXPORT=/srv/export
DIR=/mnt/nfs/study
: >/tmp/before

# fill MIB fills the server's disk except for the given number of MiB. fill 0 leaves no free block.
fill() {
  srv rm -f $EXPORT/ballast
  if [ "$1" = 0 ]; then
    srv dd if=/dev/zero of=$EXPORT/ballast bs=1M 2>/dev/null
    srv dd if=/dev/zero of=$EXPORT/ballast bs=1k oflag=append conv=notrunc 2>/dev/null
  else
    free=$(srv df -m $EXPORT | awk 'END {print $4}')
    srv dd if=/dev/zero of=$EXPORT/ballast bs=1M count=$((free - $1)) 2>/dev/null
  fi
  srv sync
}
empty() { srv rm $EXPORT/ballast; srv sync; }

# ends_with LOG PID WORDS: the child must end with these words.
ends_with() {
  ends "$2" 90 # a cached directory may be a minute old
  grep -Eqi "$3" "/tmp/$1.err" || fail "$NAME: $1 does not say $3: $(tail -n 3 "/tmp/$1.err")"
}

# goes_on FIGURES: the next run must find all acknowledged probes, and acknowledge more.
goes_on() {
  cat /tmp/before /tmp/*.acks >/tmp/all
  on b env STUDIES_TEST_ROLE=verify STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=$TAKEOVER $T </tmp/all >/tmp/verify.log 2>&1 || { fail "$NAME: $1; $(tail -n 3 /tmp/verify.log)"; return; }
  start a write next; waits next ack 60; more next 3 60; killed "$PID"
  ok "$NAME: $1; $(tail -n 1 /tmp/verify.log), and it goes on"
}

# done_with: later scenarios must find the probes of this scenario too.
done_with() { cat /tmp/*.acks >>/tmp/before; clean; }

full_at_begin() {
  NAME="full at the beginning"
  fill 40; start a write a; ends_with a "$PID" "has only .* free, but a study needs"; said=$(said a)
  fill 0; start a write a; ends_with a "$PID" "has only .* free, but a study needs"
  on b ls $DIR/fence 2>/dev/null | grep -q 0 && fail "$NAME: a study was begun"
  empty; goes_on "$said"; done_with
}

full() {
  NAME="full in mid-study"
  start a write a; A=$PID; waits a ack 60
  start b read reader; READER=$PID; waits reader reads 60
  n=$(acks a); fill 0; ends_with a "$A" "no space left|disk is full"; end=$(said a)
  start b write b; ends_with b "$PID" "no space left|has only"
  before=$(grep -c reads, /tmp/reader.acks); sleep 2
  [ "$(grep -c reads, /tmp/reader.acks)" -gt "$before" ] && kill -0 "$READER" || fail "$NAME: reader: $(said reader)"
  empty; goes_on "after $n and $(($(acks a) - n)) more: $end"; killed "$READER"; done_with
}

stale() { # a complete copy replaces the study's directory; the files that the owner has open are removed
  NAME="restored under its owner"
  start a write a; A=$PID; waits a ack 60
  kill -STOP "$A"; sync
  srv sh -c "cd $EXPORT && cp -a study copy && mv study old && mv copy study && rm -rf old"
  kill -CONT "$A"; ends_with a "$A" "stale|no such file|input/output|it was replaced"; end=$(said a)
  goes_on "$end"; done_with
}

older() { # an older copy of the database replaces it under its owner
  NAME="an older one restored under its owner"
  start a write a; A=$PID; waits a ack 60; more a 4 60
  epoch=$(ls $DIR | grep '^e0' | tail -n 1)
  kill -STOP "$A"; sync
  srv cp $EXPORT/study/$epoch/study.db /run/older; srv cp $EXPORT/study/$epoch/study.db-journal /run/older-journal
  kill -CONT "$A"; more a 8 60
  srv sh -c "cd $EXPORT/study/$epoch && rm study.db study.db-journal && cp /run/older study.db && cp /run/older-journal study.db-journal"
  ends_with a "$A" "it was removed|it was replaced|stale"; end=$(said a)
  start b write b; ends_with b "$PID" "the disk lost what it had stored"
  grep -q "tuner run --from-snapshot" /tmp/b.err || fail "$NAME: no snapshot is offered: $(cat /tmp/b.err)"
  start a write next STUDIES_TEST_FROM_SNAPSHOT=yes; waits next ack 60; more next 3 60; killed "$PID"
  ok "$NAME: $end; then: $(grep -o 'the disk lost.*' /tmp/b.err | head -n 1); a snapshot is offered, $(grep -o '[^; ]* later commits\? would be lost\|nothing was stored after it' /tmp/b.err), and it goes on from there"; clean
}

for s in ${SCENARIOS:-full_at_begin full stale older}; do $s; done
exit $bad
