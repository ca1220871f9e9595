#!/bin/sh
# What a study lives through on real NFS. Every acknowledged probe is written down outside of it (/tmp, which is no NFS), and looked for in the end.
# Prints a line for each scenario; exit code 1 says that one went wrong. KILLS is how often a tuner is killed.
T=/payload/studies.test
DIR=/mnt/nfs/study
now() { cut -d' ' -f1 /proc/uptime; }
role() { env STUDIES_TEST_ROLE="$1" STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=20s $T; }
on_b() { on b env STUDIES_TEST_ROLE="$1" STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=20s $T; }
bad=0
fail() { echo "FAIL $*"; bad=1; }
acks() { grep -c '^ack' "$1"; }
# waits LOG WORD SECONDS until the word is in the log
waits() { : >>"$1"; i=0; while ! grep -q "$2" "$1" && [ $i -lt $(($3 * 5)) ]; do sleep 0.2; i=$((i + 1)); done; grep -q "$2" "$1"; }
kill_tuners() { for p in $(srv ps | awk '/studies.tes[t]/ {print $1}'); do [ "$p" = "$READER" ] || srv kill -9 "$p" 2>/dev/null; done; }
# verified SCENARIO: all that was acknowledged so far is there, as node a finds it.
verified() {
  cat /tmp/*.acks >/tmp/all 2>/dev/null
  if env STUDIES_TEST_ROLE=verify STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=20s $T </tmp/all >/tmp/verify.log 2>&1; then
    echo "ok $1: $(tail -n 1 /tmp/verify.log)"
  else
    fail "$1: $(tail -n 3 /tmp/verify.log)"
  fi
}

echo "$(grep -c ' nfs4 ' /proc/self/mountinfo) NFS mount: $(grep ' nfs4 ' /proc/self/mountinfo | sed 's/.* - //' | cut -c1-60)"
role write >/tmp/0.acks 2>/tmp/0.err & A=$!
waits /tmp/0.acks ack 60 || fail "the first tuner does not begin: $(cat /tmp/0.err)"

on_b read >/tmp/read.log 2>&1 & READ=$!
waits /tmp/read.log reads 30 || fail "the reader does not begin: $(cat /tmp/read.log)"
READER=$(srv ps | awk '/studies.tes[t]/ {p=$1} END {print p}')
sleep 3

# The server restarts in the middle of a write.
before=$(acks /tmp/0.acks); t=$(now)
nfsd-restart 2
i=0; while [ "$(acks /tmp/0.acks)" -lt $((before + 3)) ] && kill -0 $A 2>/dev/null && [ $i -lt 300 ]; do sleep 0.2; i=$((i + 1)); done
[ "$(acks /tmp/0.acks)" -ge $((before + 3)) ] || fail "nfsd-restart: no acknowledgement came after it: $(cat /tmp/0.err)"
[ $bad = 1 ] || echo "ok nfsd-restart: at $t, three more acknowledged by $(now)"

# A second tuner on the other node.
on b timeout 60 env STUDIES_TEST_ROLE=write STUDIES_TEST_CHILD_DIR=$DIR STUDIES_TEST_TAKEOVER=20s $T >/tmp/second.acks 2>/tmp/second.err && fail "second tuner: it began beside the first"
grep -q "another tuner owns this study: pid .* on node-a since" /tmp/second.err && echo "ok second tuner: $(cut -c1-150 /tmp/second.err)" || fail "second tuner: $(cat /tmp/second.err)"

# The owner is cut off in the middle of its work, the other node takes over, and the first comes back.
kill_tuners; wait $A 2>/dev/null
on_b write >/tmp/1.acks 2>/tmp/1.err & B=$!
waits /tmp/1.acks ack 60 || fail "takeover by b: $(cat /tmp/1.err)"
sleep 2; partition b; t=$(now)
role write >/tmp/2.acks 2>/tmp/2.err & A=$!
waits /tmp/2.acks ack 120 || fail "partition: a does not take over: $(cat /tmp/2.err)"
echo "ok partition: taken over from $t to $(now)"
sleep 1; heal b
i=0; while kill -0 $B 2>/dev/null && [ $i -lt 300 ]; do sleep 0.2; i=$((i + 1)); done
kill -0 $B 2>/dev/null && fail "comeback: b is still at work"
echo "ok comeback: b ended: $(cut -c1-200 /tmp/1.err | tail -n 1)"
sleep 2; kill_tuners; wait $A 2>/dev/null
verified "partition and comeback"

# Killed again and again, on one node and the other.
n=0
while [ $n -lt "${KILLS:-6}" ]; do
  log=/tmp/kill$n.acks
  if [ $((n % 2)) = 0 ]; then on_b write >$log 2>/tmp/kill.err & else role write >$log 2>/tmp/kill.err & fi
  waits $log open 60 || fail "kill $n: $(cat /tmp/kill.err)"
  usleep $((300000 + n * 97003 % 900000))
  kill_tuners; wait $! 2>/dev/null
  n=$((n + 1))
done
verified "$n kills"

kill -0 $READ 2>/dev/null || fail "reader: it ended: $(tail -n 2 /tmp/read.log)"
srv kill -9 "$READER"; wait $READ 2>/dev/null
grep -q FAIL /tmp/read.log && fail "reader: $(grep FAIL /tmp/read.log | head -n 2)"
echo "ok reader: $(grep reads, /tmp/read.log | tail -n 1)"
exit $bad
