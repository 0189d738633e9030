#!/bin/sh
# Slurm's Epilog: as root on each host, after the job. Gives the agent time to write what it has of
# this job, whatever others do, says what there is, and removes a folder that stayed empty. It never
# fails, as the prolog.
dumps=${RANKDUMP_DUMPS:-/var/dump}
socket=${RANKDUMP_SOCKET:-/run/rankdump/agent.sock}
patience_s=${RANKDUMP_PATIENCE_S:-60}

tell() {
    echo "rankdump: $*" >&2
}

# Ranks of this job of which the agent has still something to write; empty when it knows of none, or
# does not answer.
unfinished() {
    timeout 10 rankdump status --agent "unix:$socket" --json | awk -v tree="\"$tree\"" '
        /"root":/ { own = index($0, tree) }
        own && /"unfinished_ranks":/ { gsub(/[^0-9]/, ""); print; exit }'
}

case ${SLURM_JOB_ID:-} in
'' | *[!0-9]*)
    tell "no SLURM_JOB_ID: not run by Slurm"
    exit 0
    ;;
esac
tree=$dumps/$SLURM_JOB_ID
# Nothing came: a job without a plan.
rmdir "$tree" 2>/dev/null && exit 0
[ -d "$tree" ] || exit 0
end=$(($(date +%s) + patience_s))
while left=$(unfinished) && [ "${left:-0}" -gt 0 ] && [ "$(date +%s)" -lt "$end" ]; do
    sleep 1
done
[ "${left:-0}" -gt 0 ] && tell "job $SLURM_JOB_ID: of $left ranks something is still to be written to $tree"
tell "job $SLURM_JOB_ID:"
timeout 30 rankdump status "$tree" >&2
exit 0
