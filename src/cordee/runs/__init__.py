"""How the processes of a run are led: in lockstep (team, script), on demand (dispatched), in rounds (federated)."""

# The modules whose main functions are processes of a run, for a fork server to import beforehand.
PROCESS_MODULES = (
    "cordee.runs.kind",
    "cordee.runs.team.worker",
    "cordee.runs.script.worker",
    "cordee.runs.dispatched.worker",
    "cordee.runs.dispatched.server",
    "cordee.runs.dispatched.evaluator",
    "cordee.runs.federated.worker",
)
