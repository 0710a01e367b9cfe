"""`kvarn bench`: measurements. `kvarn bench serve` puts load on a server."""

import argparse

from kvarn.cli import bench_serve


def add(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="serve", required=True)
    bench_serve.add(kinds.add_parser("serve", help="load for a server", description="load for a server"))


def run(args: argparse.Namespace) -> None:
    bench_serve.run(args)
