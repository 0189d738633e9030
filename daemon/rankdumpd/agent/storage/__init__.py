"""Files of dump trees: trees and their locks, record files, tables of statistics, graphs and the
files that describe a rank. This package uses neither gRPC nor the ledger.
"""
