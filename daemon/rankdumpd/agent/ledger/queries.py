"""The longer statements about declarations and the log of what the coordinator is told."""

REPORTING = "INSERT OR IGNORE INTO reporting VALUES (1, lower(hex(randomblob(16))), 0, 0, 0)"
# As one row, for sqlite gives up the interpreter's lock at every one.
NEXT_ITEMS = """
SELECT json_group_array(json_array(number, kind, session_id, job_id, rank, events, length(body))),
    CAST(group_concat(body, '') AS BLOB)
FROM (
    SELECT l.number, l.kind, l.session_id, l.events,
        CASE WHEN json_valid(s.request) THEN json_extract(s.request, '$.job_id') ELSE '' END
            AS job_id,
        CASE WHEN json_valid(s.request) THEN json_extract(s.request, '$.rank') ELSE 0 END AS rank,
        COALESCE(CASE WHEN l.body = x'' THEN d.body ELSE l.body END, x'') AS body
    FROM (
        SELECT *, SUM(bytes) OVER (ORDER BY number) - bytes AS before
        FROM (SELECT * FROM log WHERE number > ? ORDER BY number LIMIT ?)
    ) AS l
    LEFT JOIN sessions AS s ON s.session_id = l.session_id
    LEFT JOIN declarations AS d ON d.session_id = l.session_id AND d.sequence = l.sequence
    WHERE l.before < ?
)
"""
EMPTY_TOLD = """
UPDATE declarations SET applied = 1, body = x'' WHERE kind = 'EventColumns'
AND (session_id, sequence) IN
    (SELECT session_id, sequence FROM log WHERE number BETWEEN ? AND ? AND kind = 'events')
AND sequence < (SELECT MAX(sequence) FROM iterations AS i
    WHERE i.session_id = declarations.session_id)
"""
"""Events have taken effect once an iteration ended behind them, whatever their row says."""
NOT_APPLIED = """
applied = 0 AND (kind <> 'EventColumns' OR sequence > COALESCE((SELECT MAX(sequence)
    FROM iterations AS i WHERE i.session_id = declarations.session_id), 0))
"""
FORGET_EVENTS = """
UPDATE declarations SET applied = 1, body = x'' WHERE session_id = ?1 AND applied = 0
AND sequence <= ?2 AND sequence > COALESCE(
    (SELECT MAX(sequence) FROM iterations WHERE session_id = ?1 AND sequence < ?2), 0)
AND (sequence = ?2 OR kind = 'EventColumns' AND NOT EXISTS (SELECT 1 FROM log
    WHERE log.session_id = ?1 AND log.sequence = declarations.sequence))
"""
"""Those that the coordinator has to be told stay until it has them."""
NEWEST_TIMEOUTS = """
SELECT MAX(sequence) FROM declarations WHERE session_id = ?1 AND kind = 'Timeouts'
AND NOT EXISTS (SELECT 1 FROM log WHERE session_id = ?1 AND kind = 'timeouts')
HAVING MAX(sequence) IS NOT NULL
"""
