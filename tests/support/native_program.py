"""A native program with a model's operations, without the Python around it."""

from support.harness import load_program

from kvarn import native
from kvarn.backends.cpu.emit import emit
from kvarn.graph.fuse import fuse
from kvarn.loading.checkpoint import Checkpoint
from kvarn.models.families import graph_of


def emitted(checkpoint: Checkpoint, pool: native.Pool) -> native.Program:
    weights, program = load_program(checkpoint, pool).weights, native.Program(pool)
    emit(fuse(graph_of(checkpoint.config, checkpoint.shapes)), checkpoint.config.norm_eps, weights, program)
    return program
