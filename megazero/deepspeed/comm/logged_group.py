"""`LoggedGroup`: a script's group for layers of ours, whose all-to-alls are counted in the log."""

from __future__ import annotations

from megazero.deepspeed.comm.collectives import all_to_all_single
from megazero.deepspeed.comm.world import AnyGroup, get_world_group, require_world
from megazero.mpu.group import DONE, Group, Work
from megazero.mpu.torch_group import TorchGroup, adopted_group
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup


class LoggedGroup(WrappingGroup):
    """A group whose all-to-alls are calls of `all_to_all_single`, which counts and times them."""

    def _collective(self, call: GroupCall) -> Work:
        if call.operation != "all_to_all":
            return super()._collective(call)
        output, tensor, *splits = call.arguments
        received, sent = (None if sizes is None else list(sizes) for sizes in splits)
        return all_to_all_single(output, tensor, received, sent, self.inner, call.async_op) or DONE


def logged_group(group: AnyGroup) -> Group:
    """Wrap a group in a `LoggedGroup`; None is the world.

    Raises:
        ConfigError: no world has been joined.
    """
    if isinstance(group, Group):
        return LoggedGroup(group) if isinstance(group, TorchGroup) else group
    require_world()
    return LoggedGroup(adopted_group(group or get_world_group()))
