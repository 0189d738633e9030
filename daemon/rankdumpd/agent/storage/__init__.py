"""Files of dump trees: trees and their locks, record files, tables of statistics, graphs and the
files that describe a rank. Knows no gRPC and no ledger.
"""
