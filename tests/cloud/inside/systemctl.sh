#!/bin/bash
# In the place of a machine's systemctl: it stops timers of systemd_run.sh, and agrees to all else.
if [[ $1 == stop && -e /run/timers/$2 ]]; then
  kill "$(cat "/run/timers/$2")"
  rm "/run/timers/$2"
fi
exit 0
