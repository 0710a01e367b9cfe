"""guidance with models.OpenAI: turns and gen."""

from guidance import assistant, gen, models, user
from rows import MODEL, QUESTION, answer, run, works


def turns(address: str) -> None:
    model = models.OpenAI(MODEL, base_url=f"{address}/v1", api_key="none", echo=False)
    with user():
        model += QUESTION
    with assistant():
        model += gen("answer", max_tokens=20, temperature=1e-5)  # guidance does not send a temperature of 0
    assert model["answer"] == answer(address)


if __name__ == "__main__":
    run(("guidance",), [works("user and assistant turns, gen", turns)])
