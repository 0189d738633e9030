"""Configuration dialects: MindSpore's `data_dump.json`, CANN's `acl.json` and TF Adapter's
`DumpConfig`, all parsed into one `DumpPlan`. Only `config_file` accesses the disk.
"""
