#!/bin/sh
# TaskProlog of Slurm: runs as the user before each task; its output sets variables of the task.
# Nothing is set for a task without a plan.
dumps=${RANKDUMP_DUMPS:-/var/dump}
socket=${RANKDUMP_SOCKET:-/run/rankdump/agent.sock}

[ -n "${RANKDUMP_CONFIG:-}${MINDSPORE_DUMP_CONFIG:-}" ] || exit 0
[ -n "${RANKDUMP_AGENT:-}" ] || echo "export RANKDUMP_AGENT=unix:$socket"
[ -n "${RANKDUMP_OUTPUT:-}" ] || echo "export RANKDUMP_OUTPUT=$dumps/${SLURM_JOB_ID:-job}"
# Each step is a job of its own; a batch script is not, because its steps would inherit the id.
case ${SLURM_STEP_ID:-} in
'' | *[!0-9]*) exit 0 ;;
esac
[ "$SLURM_STEP_ID" -lt 4294967280 ] && [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${RANKDUMP_JOB_ID:-}" ] &&
    echo "export RANKDUMP_JOB_ID=$SLURM_JOB_ID.$SLURM_STEP_ID"
exit 0
