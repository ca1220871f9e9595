#!/bin/sh
# Checks that the study has all probes that were acknowledged before the power cut, and writes until the next cut. The host provides
# /payload/acked.
export STUDIES_TEST_CHILD_DIR=/mnt/nfs/study STUDIES_TEST_TAKEOVER=60s
STUDIES_TEST_ROLE=verify /payload/studies.test </payload/acked || exit 1
[ "$LAST" = yes ] || STUDIES_TEST_ROLE=write exec /payload/studies.test
