"""A model on the cpu backend, as forecasts need it: sizes, and what a step computes. It need not be loaded."""

from collections.abc import Mapping
from dataclasses import replace

from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import CpuProgram, outline_program
from kvarn.backends.loaded import check_keys
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.forecast.memory import Beside, Memory, memory_of, vocabulary_bytes
from kvarn.forecast.work import Matrix, Work, work_of
from kvarn.loading.checkpoint import Checkpoint
from kvarn.models.families import graph_of

Shapes = Mapping[str, tuple[int, ...]]


class Outlined:
    """`max_tokens`: of a step."""

    def __init__(self, program: CpuProgram, shapes: Shapes, backend: Cpu, max_tokens: int, beside: Beside) -> None:
        self.config = program.config
        self.backend = backend
        self.max_tokens = max_tokens
        self.graph = graph_of(self.config, shapes)
        self.work: Work = work_of(self.graph, matrices_of(program), self.config.vocab_size)
        self._program, self._beside = program, beside

    @classmethod
    def of_headers(
        cls, checkpoint: Checkpoint, backend: Cpu, max_tokens: int, process: int, evicted: int = 0
    ) -> "Outlined":
        """`process`: bytes that the process holds without a model. `evicted`: limit of the host cache."""
        shapes, config = checkpoint.shapes, checkpoint.config
        program = outline_program(checkpoint, graph_of(config, shapes), backend.pool)
        sentence_piece = checkpoint.metadata.get("tokenizer.ggml.model") == "llama"
        beside = Beside(process, vocabulary_bytes(config.vocab_size, sentence_piece), evicted)
        return cls(program, shapes, backend, max_tokens, beside)

    @classmethod
    def of_loaded(cls, program: CpuProgram, backend: Cpu, max_tokens: int, beside: Beside) -> "Outlined":
        weights = program.weights
        shapes: dict[str, tuple[int, ...]] = {name: (m.rows, m.cols) for name, m in weights.matrices.items()}
        shapes |= {name: vector.shape for name, vector in weights.vectors.items()}
        return cls(program, shapes, backend, max_tokens, beside)

    def plan(self, config: CacheConfig) -> Plan:
        """As it would be allocated. Raises for a cache that the backend or the model does not have."""
        check_keys(self.graph, config.codec)
        config = replace(config, max_chunk=self.max_tokens, ahead=self.backend.ahead)
        planned = plan(config, self.backend.default_layout)
        self.backend.check(planned)
        return planned

    def memory(self, planned: Plan) -> Memory:
        return memory_of(self._program, planned, self.max_tokens, self._beside)


def matrices_of(program: CpuProgram) -> dict[str, Matrix]:
    return {
        name: Matrix(matrix.kind, matrix.nbytes, matrix.rows * matrix.cols)
        for name, matrix in program.weights.matrices.items()
    }
