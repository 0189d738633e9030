#!/bin/sh
# Slurm's Prolog: as root on each host of an allocation, before the job. Makes the folder of the
# job's dump, and starts the agent where none listens. It never fails: Slurm drains a host whose
# prolog does.
dumps=${RANKDUMP_DUMPS:-/var/dump}
owner=${RANKDUMP_OWNER:-rankdump}
socket=${RANKDUMP_SOCKET:-/run/rankdump/agent.sock}

tell() {
    echo "rankdump: $*" >&2
}

case ${SLURM_JOB_ID:-} in
'' | *[!0-9]*)
    tell "no SLURM_JOB_ID: not run by Slurm"
    exit 0
    ;;
esac
# Readable for the group only, and what comes into it too.
install -d -m 2750 -o "$owner" -g "$owner" "$dumps/$SLURM_JOB_ID" ||
    tell "$dumps/$SLURM_JOB_ID cannot be made; the agent will try"
if [ ! -S "$socket" ]; then
    systemctl start rankdump-agent.service || tell "nobody listens at $socket: job $SLURM_JOB_ID is not dumped"
fi
exit 0
