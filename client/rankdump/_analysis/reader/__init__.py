"""Reader of dump trees, which implements the public names in `rankdump.reader`. It reads only what
is requested, selected by the names of folders and manifests, and never writes.
"""
