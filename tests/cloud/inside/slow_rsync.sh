#!/bin/sh
# In the place of a machine's rsync, which is `rsync.whole` then: as over a line of 16 Mbit/s. A rate that is
# asked for goes before.
first=$1
shift
exec rsync.whole "$first" --bwlimit=2000 "$@"
