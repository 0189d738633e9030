#!/bin/sh
# Slurm's TaskProlog: as the user, before each task; what it prints is its environment. A task that
# has no plan gets nothing, and runs as ever.
dumps=${RANKDUMP_DUMPS:-/var/dump}
socket=${RANKDUMP_SOCKET:-/run/rankdump/agent.sock}

[ -n "${RANKDUMP_CONFIG:-}${MINDSPORE_DUMP_CONFIG:-}" ] || exit 0
[ -n "${RANKDUMP_AGENT:-}" ] || echo "export RANKDUMP_AGENT=unix:$socket"
[ -n "${RANKDUMP_OUTPUT:-}" ] || echo "export RANKDUMP_OUTPUT=$dumps/${SLURM_JOB_ID:-job}"
exit 0
