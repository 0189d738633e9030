"""Web page for dump trees: a server on the own host that shows what the readers return. Needs
`pip install 'rankdump[web]'`.
"""
