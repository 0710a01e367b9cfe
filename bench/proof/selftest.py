"""What the backend says about itself."""

from kvarn.backends.cuda.selftest import is_exact
from proof.report import Report
from proof.site import Site

FACTS = {"name", "device", "memory", "compute", "driver", "kernels", "exact"}


def run(site: Site, report: Report) -> None:
    facts = site.backend.facts()
    with report.check("facts") as check:
        check.case(facts.keys() >= FACTS, f"facts are missing: {sorted(FACTS - facts.keys())}")
        for name, value in facts.items():
            check.number(name, value)
        check.number("opened in s", round(site.opened, 2))
    if site.size == "smallest":  # the self-test takes half a minute in the interpreter
        return
    with report.check("exact") as check:
        check.case(facts["exact"] == "yes", "the self-test says that bits depend on the tile")
        check.case(is_exact(site.driver), "the self-test, run again")
