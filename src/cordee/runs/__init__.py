"""How the processes of a run are led: in lockstep (team, script), or with work on demand (dispatched)."""

# The modules whose main functions are processes of a run, for a fork server to import beforehand.
PROCESS_MODULES = (
    "cordee.runs.kind",
    "cordee.runs.team.worker",
    "cordee.runs.script.worker",
    "cordee.runs.dispatched.worker",
    "cordee.runs.dispatched.server",
    "cordee.runs.dispatched.evaluator",
)
