#!/bin/sh
# Looks for all that was acknowledged before the power was cut, and writes until it is cut again. /payload/acked is from the host.
export STUDIES_TEST_CHILD_DIR=/mnt/nfs/study STUDIES_TEST_TAKEOVER=60s
STUDIES_TEST_ROLE=verify /payload/studies.test </payload/acked || exit 1
[ "$LAST" = yes ] || STUDIES_TEST_ROLE=write exec /payload/studies.test
