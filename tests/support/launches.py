"""What the launches of scripts/examples come to."""

#: GPUs, data-parallel size, and the model's size by the papers, in 1e9 parameters
#: (Megatron's own count; it has none for hybrids).
LAUNCHES = {
    "llama3_8b": {"gpus": 8, "data_parallel": 4, "billions": 8.03},
    "llama3_70b": {"gpus": 64, "data_parallel": 2, "billions": 70.55},
    "qwen2.5_7b": {"gpus": 8, "data_parallel": 4, "billions": 7.62},
    "qwen3_8b": {"gpus": 8, "data_parallel": 1, "billions": 8.19},
    # 15.7 of DeepSeek-V2-Lite; V3's vocabulary and one layer of multi-token prediction more.
    "deepseek_moe_mtp": {"gpus": 8, "data_parallel": 8, "billions": 16.40},
    "mamba_hybrid_8b": {"gpus": 8, "data_parallel": 2, "billions": None},
}
