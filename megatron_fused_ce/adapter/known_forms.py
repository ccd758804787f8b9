"""Forms of the functions that the head stands in for: written by scripts/dev/known_forms.py
from Megatron-LM's history, 0.15.0 to main at d98e8a64dd, and a fork; not by hand."""
# fmt: off

#: Module -> function that it defines -> digests of its forms.
FORMS = {
    "megatron.core.extensions.transformer_engine": {
        "te_general_gemm": "1ec8ebbb795c70d0 2870217199c671ef",
        "te_parallel_cross_entropy": "962049e7de1091aa",
    },
    "megatron.core.fusions.fused_cross_entropy": {
        "_VocabParallelCrossEntropy.backward": "fefb2c33b816f6d2",
        "_VocabParallelCrossEntropy.forward": "4f1fa47542a6bcb2",
        "calculate_cross_entropy_loss": "4e205659349734e3",
        "calculate_gradients": "9be9c6f0ba29b7c4",
        "calculate_logits_max": "2e5c6390aa0e1fa5",
        "calculate_predicted_logits": "3ea0885db1264082",
        "fused_vocab_parallel_cross_entropy": "d76e00311c000db3",
    },
    "megatron.core.fusions.fused_linear_cross_entropy": {
        "LinearCrossEntropy.backward": "38a29f2c32e280d8",
        "LinearCrossEntropy.forward": "76f990181336471c",
        "linear_cross_entropy": "52fb3975ed1eae3a",
    },
    "megatron.core.models.common.language_module.language_module": {
        "LanguageModule.compute_language_model_loss":
        "08c8365487383539 096a24913d36e2a4 162ab5cb32545051 80bc34fc47005be6 97a43e4bed577170 "
        "9c385d9bb9f8a8ac c81a35900e512a2b ",
    },
    "megatron.core.parallel_state": {
        "get_global_memory_buffer": "dc8510d0b08607a5",
        "get_tensor_model_parallel_group": "0117cac50f387eef",
        "get_tensor_model_parallel_rank": "314cea3c65af2858",
        "get_tensor_model_parallel_world_size": "b73f93aa02417ba8",
    },
    "megatron.core.tensor_parallel.cross_entropy": {
        "VocabParallelCrossEntropy.calculate_cross_entropy_loss": "45e4e06fed5e8d05",
        "VocabParallelCrossEntropy.calculate_gradients": "82e5db8878808354",
        "VocabParallelCrossEntropy.calculate_logits_max": "e78ec3be2aaeff66",
        "VocabParallelCrossEntropy.calculate_predicted_logits": "afa8953b0677cd30",
        "VocabParallelCrossEntropy.prepare_gradient_calculation_operands": "aaac0ec55df345c9",
        "_VocabParallelCrossEntropy.backward": "09b888e292a4ca2e 44d7122c7c0dfd0c",
        "_VocabParallelCrossEntropy.forward": "3fc12c0ba30f15a3 e71acce7c008b6b5",
        "vocab_parallel_cross_entropy": "0a8d0ec64e8dd4ad 3ed447134c35a37f",
    },
    "megatron.core.tensor_parallel.layers": {
        "ColumnParallelLinear._forward_impl": "7b99bb743c63c57e",
        "ColumnParallelLinear.forward": "6ac0ad9e5ca0d4ce cc50096e65e13261 d6bc9ed97af4205d fb24673269987039",
        "LinearWithFrozenWeight.backward":
        "5f29d2f08e48273c 64a4189d3889e49f a2ee4f74d129e9be f25d0f42c0c04317 ",
        "LinearWithFrozenWeight.forward": "653fda09d3312e83 a823cf2db1594bd9 bd722d4e42fd62e9",
        "LinearWithGradAccumulationAndAsyncCommunication.backward":
        "1eb9a5c8cc97741f 4bef4d7bbff4ace9 6ce8521f672b9346 832fdce1b675f7c0 9249548b75e23a5c "
        "aeb0d411bf0c847b babbe8e880427983 fb1b15a59543546c ff528118b3778c7b ",
        "LinearWithGradAccumulationAndAsyncCommunication.forward":
        "4112f328e92a77d0 b63a26e3c2f13c34 bb7d48e994f1b6c6 fb5531d52cde91b1 ",
        "_linear_dgrad_matmul": "ea548c952f32e8fa",
        "_linear_forward": "5404d0042dc91822",
        "_linear_forward_with_optional_batch_invariant_matmul": "2fc49121fce65dd7",
        "_should_allreduce_dgrad_in_fp32": "d20df334942b7c2e",
        "_should_compute_dgrad_in_fp32": "0a135c4d35fbb796",
        "_wgrad_gemm": "ba870ba54578d951",
        "linear_with_frozen_weight": "27fa6ceecd2dc83a 6c16acfbe1e61ee7 9c208a738c71e2ca b781cbe8695c2e68",
        "linear_with_grad_accumulation_and_async_allreduce":
        "4c77201f6534bf91 500e6a9192081881 aa1e273f816e60fa b5fa2206a6bcc8cb ",
    },
    "megatron.core.tensor_parallel.mappings": {
        "_CopyToModelParallelRegion.backward": "becdde74f7ebc86a fd749ec3640a26fa",
        "_CopyToModelParallelRegion.forward": "653f16fcde264eb9 f5f70433b0103067",
        "_GatherFromModelParallelRegion.backward": "eeae558e4cbddeca",
        "_GatherFromModelParallelRegion.forward": "f979e0330dffeb4b",
        "_GatherFromSequenceParallelRegion.backward": "169945d7443b6e7f",
        "_GatherFromSequenceParallelRegion.forward": "75e58c9ac11b9bf7",
        "_gather_along_first_dim": "bc7a32a4483ae7bc",
        "_gather_along_last_dim": "1f4b36318a556242",
        "_reduce": "8fb6d18988fc3ad1 bed7f07b9b18d3dd ee2b800b34e04b1f",
        "_reduce_scatter_along_first_dim": "d73d85994261bde4",
        "_split_along_first_dim": "bca43e9aaf9bb2ec",
        "_split_along_last_dim": "fd2bcbafbe4b43b4",
        "copy_to_tensor_model_parallel_region": "7c404a273c4e79e5 96c53bd11324c093",
        "gather_from_sequence_parallel_region": "25e10b111166d2fe",
        "gather_from_tensor_model_parallel_region": "922448cce7d4b90c",
    },
    "megatron.core.tensor_parallel.utils": {
        "VocabUtility.vocab_range_from_per_partition_vocab_size": "52472ffee277bd4c",
        "split_tensor_along_last_dim": "3462ff9dd81a2ed1",
    },
    "megatron.core.transformer.linear_cross_entropy": {
        "LinearCrossEntropyModule._compute_linear_and_cross_entropy_loss":
        "5b01f48b0d66c388 6d3e5aae88c8f0a3 ",
        "LinearCrossEntropyModule.forward": "76dfaa564598b89b f3d3d3f897fb62f3",
    },
    "megatron.core.utils": {
        "divide": "c0e5ea6924236e35",
        "get_pg_rank": "5c4a3444206873d2",
        "get_pg_size": "71bda944f60550ff",
        "get_tensor_model_parallel_group_if_none": "1c64b7325e72181b f48265b39c64d06d",
        "prepare_input_tensors_for_wgrad_compute": "4c739f8211b4872b",
    },
    "megatron.rl.rl_utils": {
        "selective_log_softmax": "8163a3f7b1a2eb48 b3b7c3f5ea2db7e0 d6dfe8f407eb6cd2",
    },
}
