#!/bin/sh
exec /usr/lib/rankdump/bin/python3 -P -m rankdump "$@"
