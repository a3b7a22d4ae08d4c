"""Where the workers of a mesh are, and who has what in common with whom."""

from __future__ import annotations

from cordee.core.mesh import Mesh


def test_places_on_a_mesh() -> None:
    mesh = Mesh(data=2, sharded=3, pipeline=2, tensor=2)
    assert [mesh.worker_at(mesh.place_of(index)) for index in range(24)] == list(range(24))
    assert mesh.place_of(1) == Mesh(0, 0, 0, 1)
    # Who shares a model's layers out is next to each other; who computes other samples is further away.
    small = Mesh(data=2, pipeline=2, tensor=2)
    assert small.rosters(["tensor"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert small.rosters(["pipeline"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert small.rosters(["data"]) == small.rosters(["data", "sharded"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_those_that_hold_the_same_and_those_that_split_it() -> None:
    mesh = Mesh(data=2, sharded=2, pipeline=3, tensor=2)
    assert [list(group) for group in mesh.same_parts()] == mesh.rosters(["data", "sharded"])
    assert [list(group) for group in mesh.same_stages()] == mesh.rosters(["tensor"])
    for stage in range(3):
        assert mesh.stage_members(stage) == [w for w in range(24) if mesh.place_of(w).pipeline == stage]
    assert (mesh.num_shares, mesh.replica_size) == (4, 6)
    assert Mesh(data=2, tensor=3).used == {"data": 2, "tensor": 3}
