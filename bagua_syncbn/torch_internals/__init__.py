"""Undocumented parts of torch that this package uses, all in this folder.

============================================  ===================================  ===================================
Part                                          Needed for                           Public alternative
============================================  ===================================  ===================================
``_dynamo_marked_constant``                   compiled training over ranks         imports the compiler (a second)
``_functorch``, ``forward_ad``                derivatives under transforms         none
``Function.apply`` without its Python part    1.5 us per call                      ``Function.apply``
``_current_graph_task_id``                    recomputations in backward           none
checkpoint hooks and modes                    recomputations without collectives   ``Repeatable`` around the function
``_DisableTorchDispatch``                     selective checkpointing              none
saved-tensor hooks in force                   recomputed outputs                   none
``_is_exporting_flag``                        errors under torch.export            ``is_exporting``, not in torch 2.10
``OptimizedModule``, ``_compiled_call_impl``  conversion of compiled models        none
``_new_process_group_helper``, ``_world``     groups created by their members      ``new_group``: may reuse addresses
group options, backends, timeouts             the user's time-outs                 none
``_dump_nccl_trace_json``, ``uid``            the stuck call in logs               none
``_c10d_functional``, group names             graphs that keep no group alive      ``torch.distributed.nn``: keeps them
``_allgather_base``                           fewer calls before torch 2.13        ``all_gather_into_tensor``
``_composable.replicate``                     with_bagua without a wrapper         ``DistributedDataParallel``
``_pytree``, ``_get_device_index``            nested batches, device indices       ``torch.utils.pytree`` in later torch
============================================  ===================================  ===================================
"""
