# Functions for the scenarios. They record every acknowledged probe in /tmp of node a, which is not on NFS, and check in the end that the
# study has it.
T=/payload/studies.test
HALT=/run/halt # both nodes see it; a child waits while $HALT-NODE exists
TAKEOVER=60s   # an owner gives up after half of it without a server; a slow machine needs that long
bad=0
now() { cut -d' ' -f1 /proc/uptime; }
ok() { echo "ok $*"; }
fail() { echo "FAIL $*"; bad=1; }
acks() { grep -c '^ack' "/tmp/$1.acks"; }
said() { tail -n 1 "/tmp/$1.err" | cut -c1-300; }
clean() { rm -f /tmp/*.acks /tmp/*.err "$HALT"*; }

# start NODE ROLE LOG [VARIABLE=VALUE…] starts a child in the background. Its output, with the acknowledged probes, goes to /tmp/LOG.acks,
# and its errors go to /tmp/LOG.err.
start() {
  _node=$1 _role=$2 _log=$3
  shift 3
  : >"/tmp/$_log.acks"
  on "$_node" env STUDIES_TEST_ROLE="$_role" STUDIES_TEST_CHILD_DIR="$DIR" STUDIES_TEST_TAKEOVER=$TAKEOVER "$@" $T >>"/tmp/$_log.acks" 2>"/tmp/$_log.err" </dev/null &
  PID=$!
}

# waits LOG WORD SECONDS waits until the child has printed the word.
waits() {
  _i=0
  while ! grep -q "$2" "/tmp/$1.acks" && [ $_i -lt $(($3 * 5)) ]; do sleep 0.2; _i=$((_i + 1)); done
  grep -q "$2" "/tmp/$1.acks" || { fail "$NAME: $1 does not print $2 within $3 s: $(said "$1")"; return 1; }
}

# more LOG N SECONDS waits until the child has acknowledged N more probes.
more() {
  _have=$(acks "$1") _i=0
  while [ "$(acks "$1")" -lt $((_have + $2)) ] && [ $_i -lt $(($3 * 5)) ]; do sleep 0.2; _i=$((_i + 1)); done
  [ "$(acks "$1")" -ge $((_have + $2)) ] || { fail "$NAME: $1 does not acknowledge $2 more within $3 s: $(said "$1")"; return 1; }
}

# ends PID SECONDS waits until a child has ended.
ends() {
  _i=0
  while kill -0 "$1" 2>/dev/null && [ $_i -lt $(($2 * 5)) ]; do sleep 0.2; _i=$((_i + 1)); done
  kill -0 "$1" 2>/dev/null && { fail "$NAME: process $1 is still at work after $2 s"; kill -9 "$1"; }
  wait "$1" 2>/dev/null
}

killed() { kill -9 "$1" 2>/dev/null; wait "$1" 2>/dev/null; }

# halted LOG NODE makes the child wait at its next commit. All that it has written so far is then on the server.
halted() {
  touch "$HALT-$2"
  waits "$1" paused 30
  sync
}
