#!/bin/bash
# Prolog of slurm.conf: runs as root on each node of a job, before it. Makes the spool's folder.
set -euo pipefail

spool=/var/tmp/rankscope-$SLURM_JOB_ID
install -d -m 0700 -o "$SLURM_JOB_UID" -g "${SLURM_JOB_GID:-0}" "$spool"
