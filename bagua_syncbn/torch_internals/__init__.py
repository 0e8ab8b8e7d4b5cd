"""Undocumented parts of torch that this package uses, all in this folder.

===========================================  ================================  ========================================
Part, and what for                           Without it                        The public way
===========================================  ================================  ========================================
``_dynamo_marked_constant``: functions that  no compiled training over ranks   ``assume_constant_result``, which imports
the compiler runs and does not trace                                           the compiler, a second, in every process
``_functorch``, ``forward_ad``: is a         wrong derivatives there           none
transform, a dual level or a batch of
gradients active; dead wrappers
``Function.apply`` without its Python part   1.5 us more in each call          ``Function.apply``
``_current_graph_task_id``: does autograd    Repeatable cannot tell a          none
run a backward pass                          repetition from a first run
``checkpoint._checkpoint_hook``,             repetitions communicate and move  none; ``Repeatable`` around the function
``CheckpointFunction``, selective modes      statistics twice
``_DisableTorchDispatch``                    selective checkpoints see what    none
                                             a repetition leaves out
saved-tensor hooks in force, and whether     outputs are stored                none
they are allowed
``_is_exporting_flag``                       a wrong error under torch.export  ``is_exporting``, true in torch 2.10 for
                                                                               all compilation
``OptimizedModule``, ``_compiled_call_impl`` compiled code outlives            none
                                             conversion
``_new_process_group_helper``, ``_world``    no group made by its members      ``new_group(use_local_synchronization=
                                             alone that can be made again      True)`` names groups by their ranks: the
                                                                               next one of the same ranks finds stale
                                                                               addresses in the store
options, backends, timeouts of a group       other time-outs than the user's   none
``_dump_nccl_trace_json``, ``uid``           the log names no call that a      none
                                             device waits in
``_c10d_functional``, names of groups        graphs would keep groups alive    ``torch.distributed.nn``, which does
``_allgather_base`` before torch 2.13        two more calls for a gather       ``all_gather_into_tensor``
``_composable.replicate``                    with_bagua needs a wrapper        ``DistributedDataParallel``
``_pytree``, ``_get_device_index``           nested batches, devices by        ``torch.utils.pytree`` of later versions
                                             number
===========================================  ================================  ========================================
"""
