#!/bin/sh
# Prolog of Slurm: runs as root on each host of an allocation before the job. Creates the folder of
# the job's dump, and starts the agent where none listens. It never fails, because Slurm drains a host
# whose prolog fails.
dumps=${RANKDUMP_DUMPS:-/var/dump}
owner=${RANKDUMP_OWNER:-rankdump}
socket=${RANKDUMP_SOCKET:-/run/rankdump/agent.sock}

log() {
    echo "rankdump: $*" >&2
}

case ${SLURM_JOB_ID:-} in
'' | *[!0-9]*)
    log "no SLURM_JOB_ID: not run by Slurm"
    exit 0
    ;;
esac
# Readable only by the group, and so is everything created in it.
install -d -m 2750 -o "$owner" -g "$owner" "$dumps/$SLURM_JOB_ID" ||
    log "$dumps/$SLURM_JOB_ID cannot be created; the agent will try"
if [ ! -S "$socket" ]; then
    systemctl start rankdump-agent.service || log "no agent listens at $socket: job $SLURM_JOB_ID is not dumped"
fi
exit 0
