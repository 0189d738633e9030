"""A report as one page of HTML with tables and charts, which needs no network to be opened.

Importing this needs bokeh, `pip install 'rankdump[report]'`; nothing else of rankdump does.
"""

from rankdump.diff.html.page import page

__all__ = ["page"]
