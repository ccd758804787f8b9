"""Forms of the functions that the head stands in for: written by scripts/dev/known_forms.py
from Megatron-LM's history, 0.15.0 to main at d98e8a64dd; not by hand."""
# fmt: off

#: Versions that are released.
RELEASES = "0.15.0 0.15.1 0.15.2 0.15.3 0.16.0 0.16.1 0.17.0 0.17.1 0.18.0 0.18.2 0.19.0 0.19.1"
#: Function -> digest -> the first release with this form, empty where none has it.
FORMS = {
    "megatron.core.fusions.fused_cross_entropy": {
        "_VocabParallelCrossEntropy.backward": {
            "fefb2c33b816f6d2": "0.15.0",
        },
        "_VocabParallelCrossEntropy.forward": {
            "4f1fa47542a6bcb2": "0.15.0",
        },
        "calculate_cross_entropy_loss": {
            "4e205659349734e3": "0.15.0",
        },
        "calculate_gradients": {
            "9be9c6f0ba29b7c4": "0.15.0",
        },
        "calculate_logits_max": {
            "2e5c6390aa0e1fa5": "0.15.0",
        },
        "calculate_predicted_logits": {
            "3ea0885db1264082": "0.15.0",
        },
        "fused_vocab_parallel_cross_entropy": {
            "d76e00311c000db3": "0.15.0",
        },
    },
    "megatron.core.models.common.language_module.language_module": {
        "LanguageModule.compute_language_model_loss": {
            "c81a35900e512a2b": "0.15.0",
            "162ab5cb32545051": "0.16.0",
            "80bc34fc47005be6": "0.18.0",
            "9c385d9bb9f8a8ac": "0.19.0",
            "08c8365487383539": "",
            "096a24913d36e2a4": "",
            "97a43e4bed577170": "",
        },
    },
    "megatron.core.tensor_parallel.cross_entropy": {
        "VocabParallelCrossEntropy.calculate_cross_entropy_loss": {
            "45e4e06fed5e8d05": "0.15.0",
        },
        "VocabParallelCrossEntropy.calculate_gradients": {
            "82e5db8878808354": "0.15.0",
        },
        "VocabParallelCrossEntropy.calculate_logits_max": {
            "e78ec3be2aaeff66": "0.15.0",
        },
        "VocabParallelCrossEntropy.calculate_predicted_logits": {
            "afa8953b0677cd30": "0.15.0",
        },
        "VocabParallelCrossEntropy.prepare_gradient_calculation_operands": {
            "aaac0ec55df345c9": "0.15.0",
        },
        "_VocabParallelCrossEntropy.backward": {
            "44d7122c7c0dfd0c": "0.15.0",
            "09b888e292a4ca2e": "0.19.0",
        },
        "_VocabParallelCrossEntropy.forward": {
            "3fc12c0ba30f15a3": "0.15.0",
            "e71acce7c008b6b5": "0.19.0",
        },
        "vocab_parallel_cross_entropy": {
            "0a8d0ec64e8dd4ad": "0.15.0",
            "3ed447134c35a37f": "0.19.0",
        },
    },
    "megatron.core.tensor_parallel.layers": {
        "ColumnParallelLinear._forward_impl": {
            "7b99bb743c63c57e": "0.15.0",
        },
        "ColumnParallelLinear.forward": {
            "d6bc9ed97af4205d": "0.15.0",
            "cc50096e65e13261": "0.18.0",
            "fb24673269987039": "0.19.0",
            "6ac0ad9e5ca0d4ce": "",
        },
        "LinearWithFrozenWeight.backward": {
            "64a4189d3889e49f": "0.15.0",
            "a2ee4f74d129e9be": "0.19.0",
            "5f29d2f08e48273c": "",
        },
        "LinearWithFrozenWeight.forward": {
            "653fda09d3312e83": "0.15.0",
            "a823cf2db1594bd9": "",
        },
        "LinearWithGradAccumulationAndAsyncCommunication.backward": {
            "fb1b15a59543546c": "0.15.0",
            "9249548b75e23a5c": "0.18.0",
            "ff528118b3778c7b": "0.19.0",
            "1eb9a5c8cc97741f": "",
            "4bef4d7bbff4ace9": "",
            "6ce8521f672b9346": "",
            "832fdce1b675f7c0": "",
            "aeb0d411bf0c847b": "",
        },
        "LinearWithGradAccumulationAndAsyncCommunication.forward": {
            "fb5531d52cde91b1": "0.15.0",
            "b63a26e3c2f13c34": "0.19.0",
            "bb7d48e994f1b6c6": "",
        },
        "_linear_forward": {
            "5404d0042dc91822": "",
        },
        "_wgrad_gemm": {
            "ba870ba54578d951": "",
        },
        "linear_with_frozen_weight": {
            "27fa6ceecd2dc83a": "0.15.0",
            "9c208a738c71e2ca": "0.17.0",
            "6c16acfbe1e61ee7": "0.19.0",
            "b781cbe8695c2e68": "",
        },
        "linear_with_grad_accumulation_and_async_allreduce": {
            "aa1e273f816e60fa": "0.15.0",
            "4c77201f6534bf91": "0.17.0",
            "b5fa2206a6bcc8cb": "0.19.0",
            "500e6a9192081881": "",
        },
    },
    "megatron.core.tensor_parallel.mappings": {
        "_CopyToModelParallelRegion.backward": {
            "becdde74f7ebc86a": "0.15.0",
        },
        "_CopyToModelParallelRegion.forward": {
            "653f16fcde264eb9": "0.15.0",
        },
        "_reduce": {
            "bed7f07b9b18d3dd": "0.15.0",
            "ee2b800b34e04b1f": "0.19.0",
        },
        "copy_to_tensor_model_parallel_region": {
            "96c53bd11324c093": "0.15.0",
        },
    },
    "megatron.core.tensor_parallel.utils": {
        "VocabUtility.vocab_range_from_global_vocab_size": {
            "cda2aeb4157c096a": "0.15.0",
        },
        "VocabUtility.vocab_range_from_per_partition_vocab_size": {
            "52472ffee277bd4c": "0.15.0",
        },
    },
    "megatron.core.utils": {
        "prepare_input_tensors_for_wgrad_compute": {
            "4c739f8211b4872b": "0.15.0",
        },
    },
    "megatron.rl.rl_utils": {
        "selective_log_softmax": {
            "b3b7c3f5ea2db7e0": "0.15.0",
            "d6dfe8f407eb6cd2": "0.16.0",
            "8163a3f7b1a2eb48": "",
        },
    },
}
#: What functions of a loss read, and that of log-probabilities, by first release.
NAMES = {
    "loss": {
        "0.15.0":
        "AssertionError MAX ReduceOp RuntimeError SUM VocabParallelCrossEntropy VocabUtility "
        "_VocabParallelCrossEntropy all_reduce apply arange as_strided bfloat16 "
        "calculate_cross_entropy_loss calculate_gradients calculate_logits_max "
        "calculate_predicted_logits cat clone config contiguous cross_entropy_fusion_impl "
        "cross_entropy_loss_fusion device distributed div_ divide exp float full_iteration "
        "fused_vocab_parallel_cross_entropy get_te_version hasattr is_te_min_version jit_fuser "
        "label_smoothing log max mean mul_ native pg_collection "
        "prepare_gradient_calculation_operands save_for_backward saved_tensors size split "
        "staticmethod sum te te_parallel_cross_entropy tensor_parallel to torch tp transpose "
        "unsqueeze view view_as vocab_parallel_cross_entropy "
        "vocab_range_from_per_partition_vocab_size vocab_size ",
    },
    "log_softmax": {
        "0.15.0":
        "append dtype float32 float64 functional gather log_softmax logsumexp nn squeeze stack "
        "torch unsqueeze zip ",
        "":
        "float ",
    },
}
