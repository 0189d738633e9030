"""Web pages for dump trees: a server on this host that shows what the readers return. Needs `pip
install 'rankdump[web]'`.
"""
