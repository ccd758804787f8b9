"""Why a head stays with Megatron's own loss, by the argument that keeps it there: one list for all readers.

:mod:`.adapter.stock_path` decides, when a model is built and at every call of its head. Imports nothing, so
that a plan of a launch can name the same reasons without Megatron.
"""

_READ_BY_HOOKS = "--save-activations-interval or --save-dgrads-interval saves the logits or their gradient"

#: Argument of Megatron, as its parser stores it -> what the log says of a head that it keeps with Megatron.
BY_ARGUMENT = {
    # where it is set
    "batch_invariant_mode": (
        "--batch-invariant-mode replaces the products and the softmax by kernels whose sums do not "
        "depend on the batch"
    ),
    "config_logger_dir": "the config logger writes the logits to disk",
    "logits_save_dir": "--logits-save-dir reads the logits",
    "logits_load_dir": "--logits-load-dir (distillation) reads the logits",
    "save_activations_interval": _READ_BY_HOOKS,
    "save_dgrads_interval": _READ_BY_HOOKS,
    # until ModelOpt's set-up joins the heads of student and teacher (adapter/modelopt.py)
    "export_kd_teacher_load": "distillation (--export-kd-teacher-load) reads the logits",
    "modelopt_enabled": "ModelOpt reads the logits",
    # of a GPTModel with --fp8-recipe mxfp8
    "fp8_output_proj": (
        "its output layer is Transformer Engine's TELMHeadColumnParallelLinear (--fp8-output-proj), not "
        "Megatron's ColumnParallelLinear"
    ),
    # where it is neither fp32 nor the parameters' dtype
    "logit_dtype": "--output-logit-dtype asks for {} logits",
    # where it is more than the tensor-parallel size
    "tensor_parallel_num_weight_shards": (
        "its weight is sharded by gtp_remat (--tensor-parallel-num-weight-shards)"
    ),
}
#: Why a launch stops whose options of the loss this package would have computed: these, and a reason above.
STOPS = (
    "{}: Megatron's own loss knows nothing of it, and the head would stay on that: {}. Leave these options "
    "out, or what keeps the head from being fused"
)
