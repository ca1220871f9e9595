#!/bin/sh
# A study on real NFS goes through a restart of the server, CRASHES power cuts of the server, a second tuner, a cut network, and KILLS kills.
# A reader reads all the time. At the end commands run on a disk that does not answer.
. /payload/lib.sh
DIR=/mnt/nfs/study
TAKEOVER=20s

# verified FIGURES: node a must find all probes that were acknowledged so far.
verified() {
  cat /tmp/*.acks >/tmp/all
  if on a env STUDIES_TEST_ROLE=verify STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=$TAKEOVER $T </tmp/all >/tmp/verify.log 2>&1; then
    ok "$NAME: $1; $(tail -n 1 /tmp/verify.log)"
  else
    fail "$NAME: $1; $(tail -n 3 /tmp/verify.log)"
  fi
}

echo "$(grep -c ' nfs4 ' /proc/self/mountinfo) NFS mount: $(grep ' nfs4 ' /proc/self/mountinfo | sed 's/.* - //' | cut -c1-60)"
NAME="start"
start a write 0 STUDIES_TEST_TAKEOVER=2m; A=$PID; waits 0 ack 60 # the server needs half a minute to restart
start b read reader; READER=$PID; waits reader reads 60
sleep 3

NAME="nfsd restarted in the middle of a write"
t=$(now); nfsd-restart 2
more 0 3 60 && ok "$NAME: at $t, three more acknowledged by $(now)"

NAME="the server's power cut, its clients live on"
n=0 t=$(now)
while [ $n -lt "${CRASHES:-1}" ]; do
  usleep $((n * 97003 % 900000))
  srv server-crash || { fail "$NAME: the server did not come back"; break; }
  more 0 3 120; n=$((n + 1))
done
crashes="$n times, from $t to $(now), $(acks 0) acknowledged by one owner"
[ "$(srv dmesg | grep -c 'vda): recovery complete')" = "$n" ] || fail "$NAME: the server lost no data, so the scenario tests nothing"

NAME="second tuner"
start b write second; S=$PID; ends $S 60
grep -q "another tuner owns this study: pid .* on node-a since" /tmp/second.err && ok "$NAME: $(said second)" || fail "$NAME: $(said second)"
killed $A
NAME="the server's power cut, its clients live on"; verified "$crashes"

NAME="cut off in the middle of its work"
start b write 1; B=$PID; waits 1 ack 60
sleep 2; partition b; t=$(now)
start a write 2; A=$PID; waits 2 ack 120; over="taken over from $t to $(now)"; n=$(acks 1)
sleep 1; heal b; ends $B 60
[ "$(acks 1)" = "$n" ] || fail "$NAME: b acknowledged after it was superseded"
sleep 2; killed $A
verified "$over, then: $(said 1)"

NAME="killed again and again"
n=0
while [ $n -lt "${KILLS:-6}" ]; do
  node=b; [ $((n % 2)) = 0 ] || node=a
  start $node write "kill$n"; K=$PID; waits "kill$n" open 60
  usleep $((300000 + n * 97003 % 900000))
  killed $K; n=$((n + 1))
done
verified "$n kills"

NAME=reader
kill -0 $READER 2>/dev/null && ! grep -q FAIL /tmp/reader.err && ok "$NAME: $(tail -n 1 /tmp/reader.acks)" || fail "$NAME: $(said reader)"
killed $READER

NAME="commands on a disk that does not answer"
# tuner N ARG… runs the command on node b. Its output and exit code go to /tmp/tunerN.err.
tuner() {
  _log=/tmp/tuner$1.err
  shift
  on b /payload/tuner "$@" >"$_log" 2>&1 </dev/null
  echo "exit code $?" >>"$_log"
}
cat >/tmp/study.yaml <<'X'
version: 1
name: new
model: m
server: {simulate: small-fast}
slo: {ttft_p99: 1000ms}
workload: {kind: random, requests: 200}
parameters: {max-num-seqs: {int: [16, 64]}}
X
on b sh -c 'cat >/tmp/study.yaml' </tmp/study.yaml
tuner 0 status $DIR
grep -q "exit code 0" /tmp/tuner0.err || fail "$NAME: before, status says $(cat /tmp/tuner0.err)"
partition b; t=$(now)
tuner 1 best $DIR & C1=$!
tuner 2 list --root /mnt/nfs & C2=$!
tuner 3 run /tmp/study.yaml --root /mnt/nfs & C3=$!
tuner 4 delete $DIR & C4=$!
for c in $C1 $C2 $C3 $C4; do ends $c 180; done
t="from $t to $(now)"; heal b
for n in 1 2 3 4; do
  grep -q "^tuner: /mnt/nfs.* does not answer within 1 min 30 s" /tmp/tuner$n.err && [ "$(tail -n 1 /tmp/tuner$n.err)" = "exit code 3" ] ||
    fail "$NAME: command $n says $(cat /tmp/tuner$n.err)"
done
[ -d $DIR ] && [ ! -e /mnt/nfs/new ] && [ $bad = 0 ] && ok "$NAME: $t: $(grep ^tuner: /tmp/tuner1.err)"
exit $bad
