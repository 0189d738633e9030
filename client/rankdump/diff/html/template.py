"""The frame of the page. Its policy forbids the browser to fetch anything at all."""

from __future__ import annotations

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""The charts' library evaluates code of its own, and has its pictures in data addresses."""
_STYLE = """
html body { height: auto; margin: 0 auto; max-width: 1500px; padding: 24px 32px 64px;
  background: #fff; color: #1c2430;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 17px; font-weight: 600; color: #5a6675; margin: 0 0 12px; }
h2 { font-size: 17px; margin: 40px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
p { margin: 2px 0; }
pre { margin: 6px 0; overflow-x: auto; }
code, pre, .operator { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.lead { border-left: 5px solid #c1121f; background: #faf6f5; padding: 12px 20px; }
.lead.fine { border-color: #3a7d44; background: #f5faf6; }
.lead h2 { margin: 4px 0; }
.lead .operator { font-size: 17px; font-weight: 600; overflow-wrap: anywhere; }
.totals, .caption, .cut { color: #5a6675; }
.totals { margin-top: 12px; }
.cut { font-style: italic; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; }
ul { margin: 4px 0; padding-left: 20px; max-height: 420px; overflow-y: auto; }
li { overflow-wrap: anywhere; }
"""
TEMPLATE = (
    "{% block preamble %}"
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    "{% endblock %}{% block postamble %}"
    f"<style>{_STYLE}</style>"
    "{% endblock %}"
    """
{% block contents %}
<h1>rankdump diff</h1>
<section class="lead {{ mood }}">{{ lead }}</section>
<section class="totals">{{ totals }}</section>
<h2>Error by operator</h2>
<p class="caption">The largest absolute error of each pair of calls, or of extremes and mean where
only figures are known; a ring is where it starts. Circles agree, diamonds differ, stars hold NaN or
infinity where the other side does not, triangles have no partner. A click on a rank hides it.</p>
{{ cut_operators }}
{{ embed(roots.by_operator) }}
<h2>How errors are distributed</h2>
<p class="caption">Tensors whose error is 0, or not known, are left out.</p>
<div class="pair">
{% if "absolute" in charts %}<div>{{ embed(roots.absolute) }}</div>{% endif %}
{% if "relative" in charts %}<div>{{ embed(roots.relative) }}</div>{% endif %}
</div>
<h2>Operators</h2>
{{ cut_operators }}
{{ embed(roots.operators) }}
<h2>Tensors</h2>
{{ cut_tensors }}
{{ embed(roots.tensors) }}
<h2>Without a partner</h2>
{{ unmatched }}
{% if notes %}<h2>Notes</h2>{{ notes }}{% endif %}
<h2>Settings</h2>
{{ settings }}
{% endblock %}
"""
)
