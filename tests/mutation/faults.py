"""Faults of the product, written by hand, and the tests of ``make test`` that must see each.

Mistakes that somebody could make in this code and not notice: most leave the usual case right. ``old`` occurs
once in its file (tests/mutation/test_mutation.py); where it no longer does, write the same fault for the new
code, do not drop it. What only a GPU can show (streams, the Hopper kernels) is not here.
"""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "megatron_fused_ce"


class Fault(NamedTuple):
    """``old`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    #: arguments of pytest, each string one run; see trial.Change
    tests: tuple[str, ...]


OP = "tests/op/test_op.py"
OPTIONS = "tests/op/test_loss_options.py"
OUTPUTS = "tests/op/test_token_outputs.py"
MASKED = "tests/op/test_masked_tokens.py"
PROMISE = "tests/op/test_promise.py"
PROPERTIES = "tests/op/test_properties.py"
ROWS = "tests/kernels/test_row_kernels.py"
SCALED_EXP = "tests/kernels/test_scaled_exp.py"
PLANNER = "tests/planner/test_planner.py"
ADAPTER = "tests/megatron/test_adapter.py"
REPORT = "tests/megatron/test_report.py"
STOCK = "tests/megatron/test_stock_path.py"
WEIGHTS = "tests/megatron/test_token_weights.py"
FAILURES = "tests/op/test_faults.py"
HEAD = "tests/parallel/test_head.py -k '2ranks and not scaled_exp'"
SMOOTHING = "tests/parallel/test_head.py -k smoothing_beside_exponentials"
CALLS = "tests/parallel/test_head_calls.py"
BROKEN = "tests/parallel/test_broken_promise.py"
MODELS = "tests/parallel/test_models.py"
TRAIN_RL = "tests/parallel/test_train_rl.py"
SLIME_AND_MILES = "tests/parallel/test_slime_and_miles.py"
MILES = f"{SLIME_AND_MILES} -k 'miles and gpt-none and 2ranks'"

FAULTS = (
    # One token's maths.
    Fault(
        "a shard's sum is not rescaled to the maximum over all shards",
        f"{PACKAGE}/row_ops.py",
        "sum_exp_nonlabel * torch.exp(row_shift - global_max)",
        "sum_exp_nonlabel",
        (f"{PROPERTIES} -k statistics_of_shards_merge",),
    ),
    Fault(
        "the last rank is left out of the maximum",
        f"{PACKAGE}/row_ops.py",
        "global_max = shards[:, ROW_MAX].amax(0)",
        "global_max = shards[: max(1, shards.shape[0] - 1), ROW_MAX].amax(0)",
        (f"{ROWS} -k merged_shards_against_fp64", f"{PROPERTIES} -k statistics_of_shards_merge"),
    ),
    Fault(
        "a confident token's loss is the difference of two logarithms",
        f"{PACKAGE}/row_ops.py",
        "        label > sum_exp_nonlabel,\n",
        "        label > torch.inf,\n",
        (f"{OP} -k confident_tokens",),
    ),
    Fault(
        "a label whose probability underflows counts as none",
        f"{PACKAGE}/row_ops.py",
        "known = (label > 0) | (shifted_label != 0)",
        "known = label > 0",
        (f"{OPTIONS} -k 'against_fp64 and z-loss'",),
    ),
    Fault(
        "the predicted id of a tie over shards is the highest",
        f"{PACKAGE}/row_ops.py",
        'row.amin(0) if name == "best"',
        'row.amax(0) if name == "best"',
        (f"{OUTPUTS} -k a_tie_over_shards",),
    ),
    Fault(
        "the label's own column stays in the sum of the others",
        f"{PACKAGE}/row_ops_torch.py",
        "z.scatter_(-1, label.columns, at_label.masked_fill_(label.mask, -torch.inf))",
        "pass",
        (f"{OP} -k 'against_fp64 and plain'",),
    ),
    Fault(
        "a label of another shard is counted here too, in column 0",
        f"{PACKAGE}/row_ops_torch.py",
        "torch.where(label.mask, at_label, NOT_HERE).squeeze(-1)",
        "at_label.squeeze(-1).clone()",
        (f"{OP} -k 'against_fp64 and odd-labels'",),
    ),
    Fault(
        "plain PyTorch rows forget the softcap's slope",
        f"{PACKAGE}/row_ops_torch.py",
        "e.mul_(softcap_grad)",
        "pass",
        (f"{OPTIONS} -k 'against_fp64 and softcap'",),
    ),
    Fault(
        "masked padding gets a gradient",
        f"{PACKAGE}/row_ops_torch.py",
        "e.masked_fill_(masked, 0.0)",
        "pass",
        (f"{OPTIONS} -k padded_columns",),
    ),
    Fault(
        "label smoothing counts one class too many",
        f"{PACKAGE}/loss_form.py",
        "float(vocab_size)",
        "float(vocab_size + 1)",
        (f"{OPTIONS} -k 'as_torch_defines_them or (against_fp64 and smoothing)'",),
    ),
    Fault(
        "the label's gradient forgets its share of the smoothing",
        f"{PACKAGE}/loss_form.py",
        "neg_label_grad - (self.sigma - self.smoothing_per_class)",
        "neg_label_grad - self.sigma",
        (f"{OPTIONS} -k 'against_fp64 and smoothing'",),
    ),
    Fault(
        "z-loss's gradient misses the factor 2",
        f"{PACKAGE}/loss_form.py",
        "more = 2 * self.z_loss",
        "more = self.z_loss",
        (f"{OPTIONS} -k 'against_fp64 and z-loss'",),
    ),
    Fault(
        "the entropy leaves out the label",
        f"{PACKAGE}/loss_form.py",
        "(extra.weighted + own)",
        "extra.weighted",
        (f"{OUTPUTS} -k 'all_outputs_against_fp64 and plain'",),
    ),
    Fault(
        "a teacher's targets of less mass than 1 get the gradient of mass 1",
        f"{PACKAGE}/loss_form.py",
        "scale = scale * terms.mass",
        "pass",
        (f"{OUTPUTS} -k 'distillation_against_fp64 and plain'",),
    ),
    # Kernels, under Triton's interpreter.
    Fault(
        "row kernel: the mask of the last columns is off by one",
        "kernels/row_kernels.py",
        "if RAGGED:\n        inside = columns < num_columns",
        "if RAGGED:\n        inside = columns <= num_columns",
        (f"{ROWS} -k statistics_and_gradients",),
    ),
    Fault(
        "row kernel: sums of earlier columns are not rescaled to a new maximum",
        "kernels/row_kernels.py",
        "sums = sums * moved + e",
        "sums = sums + e",
        (f"{ROWS} -k statistics_and_gradients",),
    ),
    Fault(
        "row kernel: a last block of one column is left out",
        "kernels/row_kernels.py",
        "if whole < num_columns:",
        "if whole < num_columns - 1:",
        (f"{ROWS} -k statistics_and_gradients",),
    ),
    Fault(
        "row kernel: a tie over blocks takes the last column",
        "kernels/row_kernels.py",
        "best = tl.where(block_max > running_max,",
        "best = tl.where(block_max >= running_max,",
        (f"{ROWS} -k argmax_takes_the_lowest",),
    ),
    Fault(
        "row kernel: one masked column gets a gradient",
        "kernels/row_kernels.py",
        "tl.where(columns < valid_columns, gradient, 0.0)",
        "tl.where(columns <= valid_columns, gradient, 0.0)",
        (f"{OPTIONS} -k triton_kernels_against_fp64",),
    ),
    Fault(
        "kernels: the softcap's slope as 1 - tanh**2",
        "kernels/softcap.py",
        "4.0 * e / ((1.0 + e) * (1.0 + e))",
        "1.0 - t * t",
        (f"{ROWS} -k bent_logits",),
    ),
    Fault(
        "token kernel: the maximum over shards drops a NaN",
        "kernels/token_kernels.py",
        "tl.where((a > b) | (a != a), a, b)",
        "tl.where(a > b, a, b)",
        (f"{ROWS} -k token_kernels_match",),
    ),
    Fault(
        "scaled-exp GEMM: the first column beside the vocabulary counts",
        "kernels/scaled_exp.py",
        "columns[None, :] >= valid_columns",
        "columns[None, :] > valid_columns",
        (f"{SCALED_EXP}::test_vocabularies_at_the_edges_of_tiles[scaled_exp-8]",),
    ),
    Fault(
        "scaled-exp GEMM: a tile far above its reference is not shifted",
        "kernels/scaled_exp.py",
        "z -= tile_shift[:, None]",
        "z -= 0.0",
        (f"{SCALED_EXP}::test_a_tile_far_above_the_reference[scaled_exp-300.0-store]",),
    ),
    Fault(
        "scaled-exp GEMM: kept exponentials miss the softcap's slope",
        "kernels/scaled_exp.py",
        "e = e * softcap_grad",
        "e = e * 1.0",
        (f"{SCALED_EXP} -k 'against_fp64 and softcap and (plain or peaked)'",),
    ),
    Fault(
        "scaled-exp GEMM: one masked column gets a gradient when it is made again",
        "kernels/scaled_exp.py",
        "tl.where(columns[None, :] < valid_columns, gradient, 0.0)",
        "tl.where(columns[None, :] <= valid_columns, gradient, 0.0)",
        (f"{SCALED_EXP} -k 'against_fp64 and masked and recompute'",),
    ),
    Fault(
        "scaled-exp GEMM: logits that are asked for rounded are not",
        f"{PACKAGE}/loss_form.py",
        'rounded=config.logit_precision == "activations"',
        "rounded=False",
        (f"{SCALED_EXP} -k 'rounded_on_purpose and plain'",),
    ),
    Fault(
        "scaled-exp GEMM: logits miss their token's temperature",
        "kernels/scaled_exp.py",
        "z = z * (scale2 * inv_temperature)\n        left_out",
        "z = z * scale2\n        left_out",
        (f"{SCALED_EXP} -k 'temperature_per_token and plain-plain-store'",),
    ),
    Fault(
        "scaled-exp GEMM: tiles of one row that differ in their shift are summed as they are",
        "kernels/scaled_exp_rows.py",
        "sum_exp_nonlabel = tl.sum(slot_sum_exp * tl.exp2(of_slot), axis=0)",
        "sum_exp_nonlabel = tl.sum(slot_sum_exp, axis=0)",
        (f"{SCALED_EXP} -k 'far_above_the_reference and 100.0'",),
    ),
    Fault(
        "scaled-exp GEMM: the entropy's sum stays at the tile's own shift",
        "kernels/scaled_exp_rows.py",
        "(tile_weighted + tile_sum * of_tile) * tl.exp2(of_tile)",
        "tile_weighted * tl.exp2(of_tile)",
        (f"{SCALED_EXP} -k squares_of_tiles",),
    ),
    Fault(
        "scaled-exp GEMM: squares of another tile's shift are moved by it once",
        "kernels/scaled_exp_rows.py",
        "tile_squares * tl.exp2(2.0 * of_tile)",
        "tile_squares * tl.exp2(of_tile)",
        (f"{SCALED_EXP} -k squares_of_tiles",),
    ),
    Fault(
        "scaled-exp GEMM: exponentials overflow when they are squared",
        "kernels/scaled_exp.py",
        "small = e * _SQUARED_UNIT",
        "small = e * 1.0",
        (f"{SCALED_EXP} -k squares_of_tiles",),
    ),
    Fault(
        "the sum of squared probabilities leaves the label out",
        f"{PACKAGE}/loss_form.py",
        "(extra.squares + own.square())",
        "extra.squares",
        ("tests/op/test_token_outputs.py -k sum_of_squared",),
    ),
    Fault(
        "a chunk of one token a rank: kernels read the first rank's labels",
        f"{PACKAGE}/pipeline.py",
        "return per_token.flatten(-2).contiguous()",
        "return per_token.flatten(-2)",
        ("tests/parallel/test_head.py -k last_chunk_of_one_token",),
    ),
    Fault(
        "fp32 logits are rounded on their way to the row kernels",
        f"{PACKAGE}/logits_backend.py",
        "torch.mm(hidden.to(out.dtype), weight.t().to(out.dtype), out=out)",
        "out.copy_(hidden @ weight.t())",
        ("tests/op/test_loss_options.py -k never_rounded",),
    ),
    Fault(
        "scaled-exp GEMM: only shards above the largest reference are brought to it",
        "kernels/scaled_exp_rows.py",
        "(own_row_shift != row_shift)",
        "(own_row_shift > row_shift)",
        (f"{CALLS} -k 'outlier_in_one_shard and store'",),
    ),
    Fault(
        "scaled-exp GEMM: a gradient that z-loss turns around keeps its sign",
        "kernels/scaled_exp_rows.py",
        "sign = tl.where(scale < 0.0, -1.0, 1.0)",
        "sign = tl.where(scale < 0.0, 1.0, 1.0)",
        (f"{SCALED_EXP} -k 'turns_the_gradient_around and -3.0 and store'",),
    ),
    Fault(
        "scaled-exp GEMM: rows are finalized with their statistics for the plain loss alone",
        "megatron_fused_ce/logits_backend.py",
        "out if alone and form.is_plain and not self.saves_logits else None",
        "out if alone and not self.saves_logits else None",
        (f"{SCALED_EXP} -k 'turns_the_gradient_around and -3.0 and store'",),
    ),
    Fault(
        "scaled-exp GEMM: sums of logits without their temperatures",
        "kernels/scaled_exp_rows.py",
        "tl.sum(sums, axis=1) * logit_scale * inv_temperature",
        "tl.sum(sums, axis=1) * logit_scale",
        (f"{SCALED_EXP} -k smoothing_at_temperatures",),
    ),
    Fault(
        "smoothing beside E: the label's entry has the constant, too",
        f"{PACKAGE}/loss_form.py",
        "neg_label_grad = neg_label_grad - self.smoothing_per_class",
        "pass",
        (f"{SCALED_EXP} -k 'against_fp64 and smoothing'",),
    ),
    Fault(
        "smoothing beside E: its vector in grad_weight is rounded once",
        f"{PACKAGE}/grad_weight.py",
        "out[1] = vector - out[0]",
        "pass",
        (f"{SCALED_EXP} -k rounding_would_lose",),
    ),
    # Between ranks.
    Fault(
        "smoothing beside E: padding columns take part in grad_weight",
        f"{PACKAGE}/logits_backend.py",
        "constant[:2, : form.real_columns]",
        "constant[:2]",
        (SMOOTHING,),
    ),
    Fault(
        "smoothing beside E: padding columns take part in sums of logits and in grad_hidden",
        f"{PACKAGE}/logits_backend.py",
        "weight[: form.real_columns].sum(",
        "weight.sum(",
        (SMOOTHING,),
    ),
    Fault(
        "smoothing beside E: grad_hidden has the constant of one shard",
        f"{PACKAGE}/pipeline.py",
        "spec.comm.sum_over_shards(column_sum * -spec.form.smoothing_per_class)",
        "column_sum * -spec.form.smoothing_per_class",
        (SMOOTHING,),
    ),
    Fault(
        "smoothing beside E: chunks that are recomputed get the constant twice",
        f"{PACKAGE}/pipeline.py",
        "self._constant_upstream = torch.zeros_like",
        "self._constant_upstream = torch.ones_like",
        (SMOOTHING,),
    ),
    Fault(
        "a shard's first id is off by one",
        f"{PACKAGE}/call.py",
        '"vocab_start")[: comm.rank])',
        '"vocab_start")[: comm.rank]) + min(comm.rank, 1)',
        (HEAD,),
    ),
    Fault(
        "label smoothing counts the classes of one shard",
        f"{PACKAGE}/call.py",
        'return sum(_all_sizes(comm, settled, "config.true_vocab_size"))',
        "return args.weight.shape[0]",
        (HEAD,),
    ),
    Fault(
        "the merge by all-reduces takes the smallest maximum",
        f"{PACKAGE}/vocab_parallel.py",
        "self._maxima, op=dist.ReduceOp.MAX",
        "self._maxima, op=dist.ReduceOp.MIN",
        (HEAD,),
    ),
    Fault(
        "the packed merge does not wait for its all-gather",
        f"{PACKAGE}/vocab_parallel.py",
        "self._pending.wait()\n        if not self._names:",
        "if not self._names:",
        (f"{CALLS} -k collectives_at_their",),
    ),
    Fault(
        "grad_hidden is not summed over the ranks without sequence parallelism",
        f"{PACKAGE}/vocab_parallel.py",
        "return _start(dist.all_reduce, partial, group=self.group)",
        "return DONE",
        (HEAD,),
    ),
    Fault(
        "sequence parallelism all-reduces in place of the reduce-scatter, and keeps the first rank's part",
        f"{PACKAGE}/vocab_parallel.py",
        "return _start(_reduce_scatter, out, partial, group=self.group)",
        "dist.all_reduce(partial, group=self.group)\n            out.copy_(partial[: out.shape[0]])\n"
        "            return DONE",
        (HEAD,),
    ),
    Fault(
        "two ranks may disagree",
        f"{PACKAGE}/vocab_parallel.py",
        "if len(set(seen)) > 1:",
        "if len(set(seen)) > 2:",
        (f"{CALLS} -k one_rank_differs",),
    ),
    Fault(
        "ranks with unequal shards plan for their own",
        f"{PACKAGE}/call.py",
        "num_rows=max(settled.shard_sizes)",
        "num_rows=args.weight.shape[0]",
        (f"{CALLS} -k other_shards",),
    ),
    # Loops.
    Fault(
        "the last chunk loses its last token",
        f"{PACKAGE}/chunking.py",
        "return min(self.num_tokens, self.longest * first)",
        "return min(max(self.num_tokens - 1, 1), self.longest * first)",
        (f"{OP} -k any_chunking",),
    ),
    Fault(
        "a chunk's tokens are taken token by token, not rank after rank",
        f"{PACKAGE}/pipeline.py",
        "return per_token.flatten(-2)",
        "return per_token.transpose(-1, -2).flatten(-2)",
        (HEAD,),
    ),
    Fault(
        "row factors are those of the first rank's tokens",
        f"{PACKAGE}/pipeline.py",
        "per_token.view(comm.num_parts, -1)[comm.part]",
        "per_token.view(comm.num_parts, -1)[0]",
        (f"{CALLS} -k 'outlier_in_one_shard and store'",),
    ),
    Fault(
        "nobody waits for the reduction of grad_hidden",
        f"{PACKAGE}/pipeline.py",
        "self._pending.popleft().wait()",
        "self._pending.popleft()",
        (f"{CALLS} -k collectives_at_their",),
    ),
    Fault(
        "fp16's scale stays in grad_hidden",
        f"{PACKAGE}/pipeline.py",
        "scale_(partial, self._inv_scale)",
        "pass",
        (f"{OP} -k 'against_fp64 and float16 and plain'",),
    ),
    Fault(
        "the backward takes the kept chunks from the wrong end",
        f"{PACKAGE}/loop.py",
        "zip(chunks, reversed(saved.chunks), strict=True)",
        "zip(chunks, saved.chunks, strict=True)",
        (f"{OP} -k 'any_chunking and store'",),
    ),
    Fault(
        "one chunk more is kept than was planned",
        f"{PACKAGE}/loop.py",
        "chunk.index < spec.plan.stored_chunks",
        "chunk.index <= spec.plan.stored_chunks",
        (f"{OP} -k 'mixed or budget'",),
    ),
    Fault(
        "grad_in_forward gathers hidden states into a slot that is still read",
        f"{PACKAGE}/loop.py",
        "depth=lag + 2 if makes_gradients",
        "depth=lag + 1 if makes_gradients",
        (f"{CALLS} -k collectives_at_their",),
    ),
    Fault(
        "grad_in_forward's grad_hidden does not get the loss's scale",
        f"{PACKAGE}/loop.py",
        "scale_(grad_hidden, scale)",
        "pass",
        (f"{PROMISE} -k 'scalar_keeps_its_digits'",),
    ),
    Fault(
        "gradients miss the scale of the logits",
        f"{PACKAGE}/loop.py",
        "upstream = upstream.scaled(logit_scale)",
        "upstream = upstream.scaled(1.0)",
        (f"{OP} -k logit_scale",),
    ),
    Fault(
        "an evaluation under no_grad keeps what a backward would need",
        f"{PACKAGE}/call.py",
        "needs_grad = torch.is_grad_enabled()\n",
        "needs_grad = True\n",
        (f"{OP} -k evaluation_is_the_forward_alone",),
    ),
    Fault(
        "autocast is ignored",
        f"{PACKAGE}/call.py",
        "hidden, weight = autocast.cast(hidden, weight)",
        "pass",
        (f"{OP} -k 'autocast and not copies'",),
    ),
    Fault(
        "losses of a batch come back in the order of the sequence",
        f"{PACKAGE}/autograd.py",
        "per_token.reshape(s, b).t().contiguous()",
        "per_token.reshape(b, s).contiguous()",
        (f"{OP} -k 'against_fp64 and plain'",),
    ),
    Fault(
        "a skipped token's gradient is what was in memory",
        f"{PACKAGE}/masked_tokens.py",
        "whole = rows.new_zeros(",
        "whole = rows.new_empty(",
        (f"{MASKED} -k the_others_are_as_before",),
    ),
    # grad_in_forward's promise, and the end of grad_weight.
    Fault(
        "the fit takes a fifth of a percent for rounding",
        f"{PACKAGE}/promise.py",
        "RTOL = 2.0**-20",
        "RTOL = 2.0**-9",
        (f"{PROMISE} -k one_wrong_token",),
    ),
    Fault(
        "the fit looks at the tokens that count alone",
        f"{PACKAGE}/promise.py",
        "fits = ((g - expected).abs() <= RTOL * expected.abs() + ATOL).all()",
        "fits = ((g - expected).abs() <= RTOL * expected.abs() + ATOL)[w != 0].all()",
        (f"{PROMISE} -k one_wrong_token",),
    ),
    Fault(
        "an upstream gradient that is not finite passes for one that fits",
        f"{PACKAGE}/promise.py",
        "torch.where(fits, KEPT, BROKEN), NOT_FINITE)",
        "torch.where(fits, KEPT, BROKEN), KEPT)",
        (f"{PROMISE} -k overflow_has_the_gradients",),
    ),
    Fault(
        "a rank does not hear that another's promise is broken",
        f"{PACKAGE}/promise.py",
        "words = largest_over_ranks(words, group)",
        "pass",
        (f"{BROKEN} -k 'one_rank_alone'",),
    ),
    Fault(
        "an overflow counts as a broken promise for ever",
        f"{PACKAGE}/autograd.py",
        "if verdict.broken:",
        "if not verdict.kept:",
        (f"{PROMISE} -k overflow_has_the_gradients",),
    ),
    Fault(
        "a broken promise is forgotten: six GEMMs for ever",
        f"{PACKAGE}/call.py",
        "self.history.broken.add(self.key)",
        "pass",
        (f"{PROMISE} -k told_once",),
    ),
    Fault(
        "specs that rely on a broken promise are looked up again",
        f"{PACKAGE}/call.py",
        "self.history.forget_specs()  # they were made with the promise",
        "pass",
        (f"{PROMISE} -k told_once",),
    ),
    Fault(
        "the recomputation begins while the forward's gradients are held",
        f"{PACKAGE}/autograd.py",
        "del made  # before anything is allocated for others",
        "pass",
        ("tests/parallel/test_memory.py -k 'grad_in_forward and gemm_rows and 2ranks'",),
    ),
    Fault(
        "gradients are added before the verdict is read, where no kernel reads it itself",
        f"{PACKAGE}/grad_weight.py",
        "        if not verdict.kept:\n            return False\n        self._touched = True\n",
        "        self._touched = True\n",
        (f"{PROMISE} -k 'broken_promise_is_recomputed and main_grad'",),
    ),
    Fault(
        "the recomputation runs grad_in_forward's plan, which has a constant to add for smoothing",
        f"{PACKAGE}/call.py",
        'return self._replace(plan=replace(self.plan, strategy="recompute"))',
        "return self",
        ("tests/parallel/test_memory.py -k 'grad_in_forward and smoothing and 2ranks'",),
    ),
    Fault(
        "the recomputation takes the upstream of the forward's first chunk for all",
        f"{PACKAGE}/loop.py",
        "self._saved.append(SavedChunk(inputs.labels, None, None, merged.terms, mass))",
        "self._saved.insert(0, SavedChunk(inputs.labels, None, None, merged.terms, mass))",
        (f"{PROMISE} -k 'broken_promise_is_recomputed and fp32-all'",),
    ),
    Fault(
        "a second backward takes the gradients that the first one used up",
        f"{PACKAGE}/autograd.py",
        "made, ctx.gradients = ctx.gradients, None",
        "made = ctx.gradients",
        (f"{PROMISE} -k second_backward",),
    ),
    Fault(
        "a gradient penalty drops out in silence",
        f"{PACKAGE}/autograd.py",
        "if not torch.is_grad_enabled():",
        "if not any(g is not None and g.requires_grad for g in grads):",
        (f"{PROMISE} -k gradient_penalty",),
    ),
    Fault(
        "a skipped token's upstream gradient is dropped",
        f"{PACKAGE}/autograd.py",
        "masked_tokens.refuse_lost(verdict.num_lost)",
        "pass",
        (f"{MASKED} -k upstream_gradient_for_a_masked_token",),
    ),
    Fault(
        "a skipped token's NaN is dropped",
        f"{PACKAGE}/autograd.py",
        "accumulators.spoilt = verdict.lost_not_finite",
        "pass",
        (f"{MASKED} -k 'overflow_leaves_nan or only_what_overflowed'",),
    ),
    Fault(
        "a failed backward leaves half a sum in main_grad",
        f"{PACKAGE}/grad_weight.py",
        "        if self._touched:\n            self.spoil()",
        "        pass",
        (f"{FAILURES} -k 'out_of_memory_anywhere and store'",),
    ),
    Fault(
        "main_grad of a low precision is added twice",
        f"{PACKAGE}/grad_weight.py",
        "self._buffer.add_(self._held.total(inv_scale))",
        "self._buffer.add_(self._held.total(inv_scale), alpha=2)",
        (f"{ADAPTER} -k main_grad_takes",),
    ),
    # The planner.
    Fault(
        "the planner allows a percent more than the budget",
        f"{PACKAGE}/planner.py",
        "if option.predicted_peak_bytes <= budget:\n                best",
        "if option.predicted_peak_bytes <= 1.01 * budget:\n                best",
        (f"{PLANNER} -k 'budget'",),
    ),
    Fault(
        "the planner forgets the logits that other heads keep",
        f"{PACKAGE}/planner.py",
        "stored_tokens * inputs.num_rows * inputs.uses_in_flight",
        "stored_tokens * inputs.num_rows",
        (f"{PLANNER} -k 'predicted_bytes'",),
    ),
    # Megatron's adapter.
    Fault(
        "--fused-ce-z-loss is not handed on",
        f"{PACKAGE}/adapter/arguments.py",
        'if hasattr(args, f"fused_ce_{option.name}")',
        'if hasattr(args, f"fused_ce_{option.name}") and option.name != "z_loss"',
        (f"{ADAPTER} -k config_from_a_command_line",),
    ),
    Fault(
        "an output layer with a bias is fused",
        f"{PACKAGE}/adapter/stock_path.py",
        '(layer.bias is not None, "its output layer has a bias"),',
        "",
        (f"{STOCK} -k reason_at_build",),
    ),
    Fault(
        "a call that gathers its logits is fused",
        f"{PACKAGE}/adapter/stock_path.py",
        "if gather_output and deferred_logits.why_caller_needs_logits():",
        "if False:",
        (f"{STOCK} -k reason_at_a_call",),
    ),
    Fault(
        "heads on the stock path are not counted",
        f"{PACKAGE}/adapter/output_layer.py",
        "counters().stock += 1",
        "pass",
        (f"{STOCK} -k stock_path_is_counted",),
    ),
    Fault(
        "a fused layer adds a name to the checkpoint",
        f"{PACKAGE}/adapter/output_layer.py",
        "layer.fused_ce_config = config",
        'layer.fused_ce_config = config\n        layer.register_buffer("fused_ce_scale", torch.ones(1))',
        (f"{MODELS} -k checkpoint_moves",),
    ),
    Fault(
        "every rank's labels begin at 0",
        f"{PACKAGE}/adapter/output_layer.py",
        "self.tp_group.rank() * self.output_size_per_partition",
        "0 * self.output_size_per_partition",
        (f"{MODELS} -k 'off_against_on and gpt-2ranks'",),
    ),
    Fault(
        "the heads of multi-token prediction get the main head's mask",
        f"{PACKAGE}/adapter/token_weights.py",
        "if call.labels is not labels:",
        "if call.labels is None:",
        (f"{WEIGHTS} -k only_the_main_loss",),
    ),
    Fault(
        "a second multiplier of the logits replaces the first",
        f"{PACKAGE}/adapter/deferred_logits.py",
        "logit_scale=self.logit_scale * other)",
        "logit_scale=other)",
        (f"{ADAPTER} -k scales_are_remembered",),
    ),
    Fault(
        "log-probabilities of a model called under no_grad have a gradient",
        f"{PACKAGE}/adapter/deferred_logits.py",
        "torch.set_grad_enabled(self._needs_grad and torch.is_grad_enabled())",
        "torch.set_grad_enabled(torch.is_grad_enabled())",
        (f"{TRAIN_RL} -k 'gpt-2ranks'",),
    ),
    Fault(
        "miles evaluates a micro-batch once for each of its samples",
        f"{PACKAGE}/adapter/miles.py",
        "if entropy not in self._made:",
        "if True:",
        (MILES,),
    ),
    Fault(
        "miles leaves its temperature out",
        f"{PACKAGE}/adapter/miles.py",
        "if args.rollout_temperature > 0:",
        "if False:",
        (MILES,),
    ),
    Fault(
        "slime and miles get an entropy without a gradient for one with",
        f"{PACKAGE}/adapter/rl_stacks.py",
        '"differentiable" if with_grad else "detached"',
        '"detached"',
        (f"{SLIME_AND_MILES} -k 'differentiable and 2ranks'",),
    ),
    Fault(
        "verl's gather sums grad_hidden a second time",
        f"{PACKAGE}/adapter/verl.py",
        "reduce_grad_hidden=False,",
        "reduce_grad_hidden=True,",
        ("tests/megatron/test_verl.py -k 'kernel_is_replaced and 2ranks'",),
    ),
    Fault(
        "SkyRL's temperature is lost on its way past SkyRL",
        f"{PACKAGE}/adapter/skyrl.py",
        "temperature=_temperature.get(),",
        "temperature=1.0,",
        ("tests/megatron/test_skyrl.py",),
    ),
    Fault(
        "a loss takes the whole vocabulary's logits for one rank's",
        f"{PACKAGE}/adapter/language_module.py",
        "if not logits.gathered or self.output_layer.tp_group.size() == 1:",
        "if True:",
        (f"{TRAIN_RL} -k mtp",),
    ),
    Fault(
        "a tied embedding's gradient is summed with memory",
        f"{PACKAGE}/adapter/main_grad.py",
        'zero = bool(getattr(weight, "zero_out_wgrad", False))',
        "zero = False",
        (f"{ADAPTER} -k dummy_is_zero",),
    ),
    Fault(
        "DDP adds the gradient that main_grad already has",
        f"{PACKAGE}/adapter/main_grad.py",
        "weight.grad_added_to_main_grad = True",
        "weight.grad_added_to_main_grad = False",
        (f"{ADAPTER} -k main_grad_takes",),
    ),
    Fault(
        "every rank prints the start-up line",
        f"{PACKAGE}/adapter/report.py",
        "if tp_rank != 0:",
        "if tp_rank < 0:",
        (f"{REPORT} -k only_the_first_rank",),
    ),
)
