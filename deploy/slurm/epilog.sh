#!/bin/bash
# Epilog of slurm.conf: runs as root on each node of a job, after it. Sends what killed processes
# left in the spool, and removes the folder when all of it is delivered. Never fails the node.
set -uo pipefail

spool=/var/tmp/rankscope-$SLURM_JOB_ID
collector=${RANKSCOPE_COLLECTOR:-storage7:4317}
rankscope=${RANKSCOPE_COMMAND:-/opt/rankscope/bin/rankscope}

[ -d "$spool" ] || exit 0
# As the user of the job: what lies there is theirs.
if runuser -u "${SLURM_JOB_USER:-$(id -nu "$SLURM_JOB_UID")}" -- \
    "$rankscope" deliver "$spool" --collector "$collector" --timeout 30; then
    rm -rf -- "$spool"
else
    logger -t rankscope "job $SLURM_JOB_ID: not all was delivered; it stays in $spool"
fi
exit 0
