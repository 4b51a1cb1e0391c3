"""Flags of forks: read as what they mean here, accepted without effect, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.compat.rows import DIALECTS
from megazero.config.flags import FLAGS, scan
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS
from tests.tables import over_table


def settings(argv: str) -> dict[str, object]:
    result = scan(argv.split())
    assert result.problems == []
    return {setting.spec.path: setting.value for setting in result.settings}


@over_table("name", sorted(name for name in FLAGS if "-" in name[2:]))
def test_underscores_stand_for_dashes(name: str) -> None:
    plain, other = scan([name, "1"]), scan([f"--{name[2:].replace('-', '_')}", "1"])
    assert [(s.spec.path, s.value) for s in plain.settings] == [
        (s.spec.path, s.value) for s in other.settings
    ]
    assert len(plain.problems) == len(other.problems)


@over_table(
    ("fork", "argv", "expected"),
    [
        ("bigscience", "--pp-partition-method type:transformer|embedding",
         {"parallel.pipeline_partition": "type:transformer|embedding"}),
        ("bigscience", "--pad-vocab-size-to 250880", {"model.pad_vocab_size_to": 250_880}),
        ("bigscience", "--skip-train-iteration-range 3-5 8-8",
         {"guards.iterations_to_skip": (2, 3, 4, 7)}),
        ("bigscience", "--train-weighted-split-paths-path f.txt", {"data.train_data_path": ("@f.txt",)}),
        ("bigscience", "--glu-activation swiglu", {"model.activation": "swiglu"}),
        ("pai", "--patch-tokenizer-type LLamaTokenizer --load hf --extra-vocab-size 256",
         {"tokenizer.tokenizer_type": "HFTokenizer", "tokenizer.tokenizer_model": "hf",
          "checkpoint.load": "hf", "model.extra_vocab_size": 256}),
        ("pai", "--optimizer hybridadam", {"optimizer.optimizer": "adam", "offload.optimizer": "cpu"}),
        ("megatron_llm", "--use_rms_norm --no_tie_embed_logits",
         {"model.normalization": "RMSNorm", "model.untie_embeddings_and_output_weights": True}),
        ("megatron_llm", "--rope_scaling_factor 4", {"model.rotary_seq_len_interpolation_factor": 4.0}),
        ("megatron_llm", "--vocab_extra_ids_list a,b,c", {"model.extra_vocab_size": 3}),
        ("megablocks", "--num-layers 12 --moe-num-experts=64 --moe-loss-weight=0.12",
         {"model.num_layers": 12, "model.num_experts": (64,), "model.moe_layer_freq": (1,),
          "model.moe_router_pre_softmax": True, "model.moe_aux_loss_coeff": (0.01,)}),
        ("zero_bubble", "--enable-zero-bubble", {"parallel.pipeline_schedule": "zb-h1"}),
        ("turing", "--wandb-name n --tokenizer-type JapaneseSentencePiece --vocab-file s.model",
         {"logging.wandb_exp_name": "n", "tokenizer.tokenizer_type": "GPTSentencePieceTokenizer",
          "tokenizer.tokenizer_model": "s.model"}),
        ("habana", "--optimizer fusedadamw --num-key-value-heads 8",
         {"optimizer.optimizer": "adam", "model.num_query_groups": 8}),
        ("argonne", "--train-range-to-skip 2 4 9 9", {"guards.iterations_to_skip": (1, 2, 3, 8)}),
        ("mindspeed", "--context-parallel-algo ulysses_cp_algo", {"parallel.cp_comm_type": ("a2a",)}),
    ],
)  # fmt: skip
def test_a_fork_s_flag_means(fork: str, argv: str, expected: dict[str, object]) -> None:
    assert settings(f"--dialect {fork} {argv}") == expected


@over_table(
    "argv",
    [
        "--use-mpi", "--experiment-name e", "--rank 0 --world-size 8 --dist-url env://",
        "--wandb-anything a b", "--log-some-figure-to-tensorboard", "--profile-my-kernels 3",
        "--use-fused-thing", "--codecarbon-dir d", "--clearml-project p", "--no-log-x",
        "--overlap-everything", "--torch_compile_mode max",
        "--kill-switch-path k", "--max-padding-length 2048", "--adlr-autoresume",
    ],
)  # fmt: skip
def test_logging_scheduling_and_kernels_stop_no_run(argv: str) -> None:
    result = scan([*argv.split(), "--num-layers", "7"])
    assert result.problems == []
    assert [setting.value for setting in result.settings] == [7]
    assert {ignored.name.replace("_", "-") for ignored in result.ignored} >= {
        token for token in argv.replace("_", "-").split() if token.startswith("--") and "kill" not in token
    }


def test_a_line_of_no_named_fork_is_read_as_the_fork_that_knows_most_of_it() -> None:
    result = scan(
        [
            *("--pp-partition-method", "uniform", "--eval-only", "true"),
            *("--rope_scaling_factor", "8", "--num-layers", "2"),
        ]
    )
    values = {setting.spec.path: setting.value for setting in result.settings}
    assert values["training.skip_train"] is True
    assert values["model.rope_scaling_factor"] == 8.0, "it is Megatron-LLM's other meaning only in its lines"
    (problem,) = scan(["--no_new_tokens", "--rope_scaling_factor", "8"]).problems
    assert problem.startswith("`--rope-scaling-factor` means another thing to megatron_llm")
    assert "(`--dialect bigscience` says so)" in result.warnings[0]
    assert "`--pp-partition-method uniform` as `--pipeline-partition uniform`" in result.warnings[0]


@over_table(
    ("argv", "says"),
    [
        ("--dialect nobody", "`--dialect` must be one of argonne, bigscience, "),
        (
            "--dialect bigscience --glu-activation geglu",
            "use `--swiglu`; GEGLU there is of the exact GELU, and `--activation geglu` of the tanh form",
        ),
        ("--dialect pai --dataset LLama-SFT-Raw", "`--dataset LLama-SFT-Raw` is not accepted: it reads"),
        ("--patch-tokenizer-type T", "must come with `--load`, but it is missing."),
        (
            "--dialect bigscience --train-weighted-split-paths a",
            "must be WEIGHT START:STOP PREFIX, but is `a`",
        ),
        ("--pp-partition-method uniform --no-such 1", "unknown flag `--no-such`"),
        (
            "--grad-comp",
            "gradients and hidden states are sent whole; leave it out, or take `--optimizer onebit-adam`",
        ),
        ("--mup", "leave it out, and set `--lr` and `--init-method-std`"),
        ("--fmoefy", "say experts with `--num-experts`"),
        ("--sequence-packing", "use `--pack best-fit`"),
        ("--json-file f", "with `megazero data preprocess`"),
        ("--expert-choise-bucket 4 --capacity 1.0", "`--capacity 1.0` is not accepted: routers are trained"),
        ("--capacity 1.0", "unknown flag `--capacity`"),
    ],
)
def test_refused_with_what_to_do(argv: str, says: str) -> None:
    assert any(says in problem for problem in scan(argv.split()).problems)


def test_an_unknown_flag_beside_those_of_a_fork_names_the_fork() -> None:
    _, problem = scan(["--pp-partition-method", "uniform", "--no-such", "1"]).problems
    assert (
        problem == "unknown flags are not those of `--dialect bigscience` either, as others of this line are."
    )


@over_table("fork", DIALECTS)
def test_every_row_leads_to_flags_that_exist_or_to_a_reason(fork: str) -> None:
    for rows in DIALECTS[fork].values():
        for row in rows:
            flags = [token for token in row.same or () if token.startswith("--")]
            unknown = [flag for flag in flags if "unknown" in " ".join(scan([flag, "1"]).problems)]
            assert unknown == []
            assert row.same or len(row.accepted or row.refused or "") > 5


def test_a_run_with_a_fork_s_flags_is_that_of_ours() -> None:
    theirs = "--dialect bigscience --pp-partition-method uniform --pad-vocab-size-to 1024 --vocab-size 1000"
    ours = "--pipeline-partition uniform --pad-vocab-size-to 1024 --vocab-size 1000"
    assert (
        parse_config([*BASE_FLAGS, *theirs.split()], world_size=1).config
        == parse_config([*BASE_FLAGS, *ours.split()], world_size=1).config
    )


def test_rows_of_a_table_fit_the_ranks_and_the_vocabulary() -> None:
    argv = "--pad-vocab-size-to 1000 --vocab-size 999 --extra-vocab-size 2"
    with pytest.raises(ConfigError, match=r"\[rule padded_vocabulary_fits\]"):
        parse_config([*BASE_FLAGS, *argv.split()], world_size=1)


@over_table(
    ("argv", "expected"),
    [
        ("--pipeline-model-parallel-layout Et*3|(tt|)*6tL --num-layers 16", ("3,2,2,2,2,2,2,1", 4)),
        ("--pipeline-model-parallel-layout Ett|ttL --num-layers 4", ("2,2", None)),
        ("--decoder-first-pipeline-num-layers 1 --num-layers 4", ("1,3", None)),
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2 --num-layers 3",
         ("1,2", None)),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 6",
         ("3,3", None)),
        ("--account-for-loss-in-pipeline-split --num-layers 7", ("4,3", None)),
        ("--model-family t5 --num-layers 4 --pipeline-model-parallel-split-rank 1", ("4,4", None)),
        ("--model-family t5 --num-layers 4 --decoder-num-layers 3 --pipeline-model-parallel-split-rank 1",
         ("4,3", None)),
    ],
)  # fmt: skip
def test_layers_are_dealt_as_megatrons_flags_say(argv: str, expected: tuple[str, int | None]) -> None:
    values = settings(f"--pipeline-model-parallel-size 2 {argv}")
    found = (
        values["parallel.pipeline_partition"],
        values.get("parallel.num_virtual_stages_per_pipeline_rank"),
    )
    assert found == expected


@over_table(
    ("argv", "says"),
    [
        ("--pipeline-model-parallel-layout Ett|mL --num-layers 2", "every stage must have a layer"),
        ("--pipeline-model-parallel-layout abc --num-layers 2", "a layout is made of E, t, m, L, |"),
        ("--pipeline-model-parallel-layout Et|t|tL --num-layers 3", "3 parts cannot be dealt over 2 stages"),
        ("--decoder-first-pipeline-num-layers 1 --num-layers 1", "every stage must have a layer"),
        (
            "--account-for-loss-in-pipeline-split --num-layers 4",
            "4 layers do not come out even over 2 stages",
        ),
        (
            "--account-for-loss-in-pipeline-split --num-layers 7 --num-virtual-stages-per-pipeline-rank 2",
            "with several chunks on a stage",
        ),
        (
            "--pipeline-model-parallel-size 3 --model-family t5 --num-layers 3 "
            "--pipeline-model-parallel-split-rank 1",
            "3 layers do not come out even over 2 stages",
        ),
        (
            "--model-family t5 --num-layers 4 --pipeline-model-parallel-split-rank 2",
            "4 layers do not come out even over 0 stages",
        ),
    ],
)
def test_layers_that_cannot_be_dealt_so_are_refused(argv: str, says: str) -> None:
    problems = scan(f"--pipeline-model-parallel-size 2 {argv}".split()).problems
    assert any(says in problem for problem in problems)


@over_table(
    ("argv", "expected"),
    [
        ("--rope-theta 5e5 --intermediate-size 64", {"model.rotary_base": 5e5, "model.ffn_hidden_size": 64}),
        ("--optimizer adamw --normalization rms_norm",
         {"optimizer.optimizer": "adam", "model.normalization": "RMSNorm"}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --use-distributed-optimizer",
         {"zero.stage": 2}),
        ("--tokenizer-type Qwen2Tokenizer --tokenizer-model f",
         {"tokenizer.tokenizer_type": "HFTokenizer", "tokenizer.tokenizer_model": "f"}),
        ("--batch-size 4 --warmup 0.1 --model-parallel-size 2",
         {"batch.micro_batch_size": 4, "optimizer.lr_warmup_fraction": 0.1,
          "parallel.tensor_model_parallel_size": 2}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {"zero.stage": 3}),
        ("--data-parallel-sharding-strategy optim_grads_params", {}),
        ("--use-swiglu=true", {"model.activation": "swiglu"}),
        ("--rope-scaling-type llama3 --original-max-position-embeddings 8192",
         {"model.use_rope_scaling": True, "model.rope_original_max_position_embeddings": 8192}),
        ("--use-rope-scaling --original-max-position-embeddings 8192",
         {"model.use_rope_scaling": True, "model.rope_original_max_position_embeddings": 8192}),
        ("--position-embedding-type yarn --original-max-position-embeddings 2048",
         {"model.position_embedding_type": "yarn", "model.yarn_original_max_position_embeddings": 2048}),
        ("--dialect mindspeed --rope-scaling-original-max-position-embeddings 2048",
         {"model.yarn_original_max_position_embeddings": 2048}),
        ("--dialect mindspeed --sparse-mode 2 --pre-tockens 65536 --next-tockens 0", {}),
        ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-5",
         {"optimizer.decoupled_lr": 1e-4, "optimizer.decoupled_min_lr": 1e-5}),
        ("--relu --input-embeddings-multiplier 50",
         {"model.activation": "relu", "model.embedding_multiplier": 50.0}),
        ("--no-cuda --distributed-backend mpi",
         {"parallel.device": "cpu", "parallel.distributed_backend": "auto"}),
        ("--synthetic --lr-wsd-decay-style 1-sqrt",
         {"data.mock_data": True, "optimizer.lr_wsd_decay_style": "minus_sqrt"}),
        ("--rope-factor 8 --position-embedding-type learned",
         {"model.rope_scaling_factor": 8.0, "model.position_embedding_type": "learned_absolute"}),
    ],
)  # fmt: skip
def test_words_of_many_trainers(argv: str, expected: dict[str, object]) -> None:
    assert settings(argv) == expected


@over_table(
    "argv",
    [
        "--use-attn-bias false", "--enable-final-norm 0", "--use-something true", "--use-something false",
        "--use-tied-embeddings false", "--use-dropout false", "--enable-position-embeddings false",
        "--dropout-free",
    ],
)  # fmt: skip
def test_a_flag_that_turns_something_off_asks_for_something(argv: str) -> None:
    """`--use-dropout false` was taken as off anyway, but models have a dropout of 0.1."""
    assert "unknown flag" in scan(argv.split()).problems[0]


@over_table(
    "flag",
    [
        "--use-swiglu", "--use-rmsnorm", "--use-rope", "--gradient-checkpointing",
        "--no-masked-softmax-fusion", "--use-causal-mask", "--use-moe", "--dialect pai --eval-dev",
    ],
)  # fmt: skip
def test_a_switch_that_is_given_as_off_is_not_read_as_on(flag: str) -> None:
    """`--use-swiglu=false` was read as `--swiglu`."""
    result = scan(f"{flag}=false".split())
    name = flag.split()[-1]
    assert result.problems == [
        f"`{name}` is a switch that must stand alone or be true, but is `false`; leave it out."
    ]
    assert result.settings == []


@over_table(
    ("argv", "says"),
    [
        ("--dialect mindspeed --sparse-mode 4", "it lets attention see a band; say so with"),
        ("--dialect mindspeed --pre-tockens 4096", "`--window-size`, whose first number is that of `--pre-"),
        ("--dialect mindspeed --spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec",
         "layers are built from settings"),
        ("--dialect mindspeed --rope-scaling-type plm", "say `--use-rope-scaling` for Llama 3's scaling"),
        ("--dialect pai --enable-shared-expert", "its gate in Qwen with `--moe-shared-expert-gate`"),
        ("--reset-progress --load x", "use `--finetune`, which loads weights only and starts counting anew"),
        ("--dialect megatron_llm --parallel-attn", "attention and MLP beside each other are `--use-par"),
        ("--dialect turing --use-embedding-scaling", "say the factor of the embeddings with `--emb"),
        ("--moe-token-dispatcher-type flex --moe-expert-rank-capacity-factor 1.0",
         "the tokens of a rank are not bounded, only those of an expert"),
        ("--use-megatron-fsdp --megatron-fsdp-main-params-dtype auto", "that the optimizer updates are"),
        ("--model-type llama", "`--model-type llama` is not accepted"),
    ],
)  # fmt: skip
def test_what_changes_numbers_is_not_without_effect(argv: str, says: str) -> None:
    (problem,) = scan(argv.split()).problems
    assert says in problem


@over_table(
    ("argv", "says"),
    [
        ("--use-moe", "say how many experts there are with `--num-experts`"),
        ("--use-gqa", "say how many key/value heads there are with `--num-query-groups`"),
        ("--use-bias --disable-bias-linear", "it contradicts `--disable-bias-linear`"),
        (
            "--no-new-tokens --sync-tp-duplicated-parameters",
            "what is left out means different things to bigscience and megatron_llm; say whose line this is",
        ),
        ("--disable-moe --num-experts 4", "it contradicts `--num-experts`"),
        ("--tie-word-embeddings --untie-embeddings-and-output-weights", "it contradicts `--untie-embeddings"),
        ("--causal --model-family bert", "tokens attend to all others in a BERT"),
        (
            "--grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32",
            "it contradicts `--grad-reduce-in-bf16`",
        ),
        (
            "--bf16 --grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype bf16",
            "are added up with `--main-grads-dtype`",
        ),
        (
            "--bf16 --main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16",
            "are sent with `--grad-reduce-dtype`",
        ),
        ("--fp8-format hybrid --bf16 --no-fp8-wgrad", "all products of linear layers are of 8-bit floats"),
    ],
)
def test_what_says_what_a_model_has_must_be_true_of_it(argv: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config([*BASE_FLAGS, *argv.split()], world_size=1)
    assert any(says in problem for problem in caught.value.violations)


@over_table(
    "argv",
    [
        "--use-moe --num-experts 4", "--use-gqa --num-query-groups 2", "--causal --tie-word-embeddings",
        "--disable-moe --no-use-alibi", "--no-fp8-wgrad", "--megatron-fsdp-grad-comm-dtype fp32",
        "--grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype auto --bf16",
        # Without `--grad-reduce-in-bf16` Megatron-LM sets both to fp32, whatever they are.
        "--bf16 --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16",
    ],
)  # fmt: skip
def test_what_says_what_a_model_has_is_accepted_where_it_is_true(argv: str) -> None:
    parse_config([*BASE_FLAGS, *argv.split()], world_size=1)


@over_table(
    ("argv", "expected"),
    [
        ("--moe-num-experts 4", (1, (0.025,), True)),
        ("--moe-num-experts 4 --moe-top-k 2 --moe-loss-weight 0.4", (2, (0.1,), True)),
        ("--moe-num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0", (2, (0.0,), True)),
        ("--dialect megatron_llm", (2, (0.0,), False)),
        ("--no-new-tokens", (2, (0.0,), False)),
        ("--dialect megatron_llm --use-bias", (2, (0.0,), True)),
        ("--no-use-alibi", (2, (0.0,), True)),
        ("--use-bias --sliding-window-size 16", (2, (0.0,), True)),
        ("--moe-num-experts 4 --adam-w-mode --sync-tp-duplicated-parameters", (1, (0.025,), True)),
    ],
)
def test_what_a_fork_s_line_leaves_out_has_its_default(argv: str, expected: tuple[object, ...]) -> None:
    """MegaBlocks chooses one expert and weighs the loss by 0.1 over the layers, here 4; Megatron-LLM's
    layers have no biases.
    """
    model = parse_config([*BASE_FLAGS, *argv.split()], world_size=1).config.model
    assert (model.moe_router_topk, model.moe_aux_loss_coeff, model.add_bias_linear) == expected


def test_a_file_of_settings_is_heard_before_a_fork_s_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {add_bias_linear: true}\n", encoding="utf-8")
    argv = [*BASE_FLAGS, "--dialect", "megatron_llm"]
    assert parse_config([*argv, "--config", str(file)], world_size=1).config.model.add_bias_linear
    said = parse_config(argv, world_size=1).warnings
    assert (
        "what a line of megatron_llm leaves out means what it means there: `--disable-bias-linear`." in said
    )


def test_a_fork_is_not_assumed_from_names_that_anyone_uses() -> None:
    """`--model-name` made this a line of Megatron-LLM, whose `--rope-scaling-factor` is another."""
    line = "--model-name llama --log-level info --use-mpi --wandb-id x --jit-compile"
    assert settings(f"{line} --use-rope-scaling --rope-scaling-factor 8") == {
        "model.use_rope_scaling": True,
        "model.rope_scaling_factor": 8.0,
    }


def test_flags_of_megatron_lm_itself_are_not_those_of_a_fork() -> None:
    """`--data-args-path`, and what says that all is as it is here, or how to have it so."""
    (said,) = scan(["--data-args-path", "f"]).warnings
    assert said == "flags are read as what they mean here: `--data-args-path f` as `--data-path @f`."
    line = "--pipeline-model-parallel-split-rank 1 --test-mode --global-batch-size 8 --eval-iters 10"
    same = scan([*line.split(), "--eval-global-batch-size", "8"])
    assert (same.problems, len(same.ignored)) == ([], 3)
    (refused,) = scan([*line.split(), "--eval-global-batch-size", "16"]).problems
    assert refused.endswith("for as many samples leave it out and give `--eval-iters 20`")


def test_the_encoder_s_layers_are_those_of_t5() -> None:
    assert settings("--encoder-num-layers 4") == {"model.t5_encoder_layers": 4}
