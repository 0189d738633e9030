#!/bin/sh
# Epilog of Slurm: runs as root on each host after the job. Waits until the agent has written all
# tensors of this job, logs the result, and removes a folder that stayed empty. Like the prolog, it
# never fails.
dumps=${RANKDUMP_DUMPS:-/var/dump}
socket=${RANKDUMP_SOCKET:-/run/rankdump/agent.sock}
patience_s=${RANKDUMP_PATIENCE_S:-60}

log() {
    echo "rankdump: $*" >&2
}

# Prints the number of ranks of this job with unwritten tensors; nothing when the agent has no such job
# or does not answer.
unfinished() {
    timeout 10 rankdump status --agent "unix:$socket" --json | awk -v tree="\"$tree\"" '
        /"root":/ { own = index($0, tree) }
        own && /"unfinished_ranks":/ { gsub(/[^0-9]/, ""); print; exit }'
}

case ${SLURM_JOB_ID:-} in
'' | *[!0-9]*)
    log "no SLURM_JOB_ID: not run by Slurm"
    exit 0
    ;;
esac
tree=$dumps/$SLURM_JOB_ID
# The folder is empty: a job without a plan.
rmdir "$tree" 2>/dev/null && exit 0
[ -d "$tree" ] || exit 0
end=$(($(date +%s) + patience_s))
while left=$(unfinished) && [ "${left:-0}" -gt 0 ] && [ "$(date +%s)" -lt "$end" ]; do
    sleep 1
done
[ "${left:-0}" -gt 0 ] && log "job $SLURM_JOB_ID: tensors of $left ranks are not yet written to $tree"
log "job $SLURM_JOB_ID:"
timeout 30 rankdump status "$tree" >&2
exit 0
