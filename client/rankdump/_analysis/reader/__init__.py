"""Reader of dump trees, behind the public names in `rankdump.reader`. Reads only what is asked for,
by the names of folders and manifests; never writes.
"""
