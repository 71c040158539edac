"""Programs that learn from text, series, graphs, environments and drawn numbers."""

from __future__ import annotations

from third_party_programs import generators as make
from third_party_programs.pictures import PIXEL
from third_party_programs.records import (
    DATA,
    NO_TARGETS,
    OLD_PROTOBUF,
    Expected,
    Fault,
    Program,
    cleanrl,
    example,
    nan,
    record,
    reward,
    too_fast,
    tutorial,
)

LANGUAGE = (
    example(
        "word_language_model",
        *("main.py", "--data", "corpus", "--model", "RNN_RELU", "--emsize", "32", "--nhid", "32", "--epochs", "1"),
        *("--batch_size", "8", "--log-interval", "5"),
        name="word-rnn",
        data=make.words("corpus/train.txt", "corpus/valid.txt", "corpus/test.txt"),
        faults=(too_fast("--lr", "1e20"),),
    ),
    example(
        "word_language_model",
        *("main.py", "--data", "corpus", "--model", "Transformer", "--emsize", "32", "--nhid", "32", "--epochs", "1"),
        *("--batch_size", "8", "--log-interval", "5", "--use-optimizer", "--lr", "0.001"),
        name="word-transformer",
        data=make.words("corpus/train.txt", "corpus/valid.txt", "corpus/test.txt"),
        faults=(too_fast("--lr", "1e30"),),
    ),
    Program(
        name="nanogpt",
        repository="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        folder=".",
        command=(
            *("train.py", "--device=cpu", "--compile=False", "--dataset=small", "--eval_iters=2", "--eval_interval=10"),
            *("--batch_size=4", "--block_size=32", "--n_layer=2", "--n_head=2", "--n_embd=32", "--max_iters=20"),
            *("--gradient_accumulation_steps=2", "--warmup_iters=2", "--lr_decay_iters=20", "--dtype=float32"),
        ),
        data=make.tokens("data/small"),
        faults=(too_fast("--learning_rate=1e30"),),
    ),
    Program(
        name="mingpt-adder",
        repository="karpathy/minGPT",
        commit="37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        folder="projects/adder",
        command=("adder.py", "--trainer.max_iters=60", "--trainer.batch_size=1", "--trainer.num_workers=0"),
        paths=("../..",),
        faults=(
            record(
                "a record whose targets are all ignored",
                Expected(causes=NO_TARGETS, op="nll_loss.*|cross_entropy.*", module="", lines=(r"F\.cross_entropy\(",)),
                path=(1,),
                value="-1",
                every=True,
                batch=115,
                row=0,
            ),
            too_fast("--trainer.learning_rate=1e30"),
        ),
    ),
    Program(
        name="makemore",
        repository="karpathy/makemore",
        commit="988aa59e4d8fefa526d06f3b453ad116258398d4",
        folder=".",
        command=(
            "makemore.py",
            "-i",
            "names.txt",
            "--max-steps",
            "60",
            "--type",
            "transformer",
            "--n-layer",
            "2",
            "-b",
            "1",
            "-n",
            "0",
        ),
        data=make.names("names.txt"),
        faults=(
            record(
                "a record whose targets are all ignored",
                Expected(causes=NO_TARGETS, op="nll_loss.*|cross_entropy.*", module="", lines=(r"F\.cross_entropy\(",)),
                path=(1,),
                value="-1",
                every=True,
                batch=20,
                row=0,
            ),
            too_fast("-l", "1e30"),
        ),
    ),
)

SEQUENCES = (
    example(
        "time_sequence_prediction",
        *("train.py", "--steps", "2"),
        data=make.sines("traindata.pt"),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        faults=(
            Fault(
                name="file",
                what="a NaN in one series of the file",
                data=make.sines("traindata.pt", bad=(5, 20)),
                expected=Expected(causes=DATA, module="lstm1", lines=(r"self\.lstm1\(input_t",), sample=2),
            ),
        ),
    ),
    Program(
        name="tcn-music",
        repository="locuslab/TCN",
        commit="2f8c2b817050206397458dfd1f5a25ce8a32fe65",
        folder="TCN/poly_music",
        command=("music_test.py", "--cuda", "--epochs", "1", "--nhid", "16", "--log-interval", "10"),
        data=make.music("mdata/Nottingham.mat"),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        seed=1,
        faults=(
            Fault(
                name="file",
                what="a NaN note in one piece of the file",
                data=make.music("mdata/Nottingham.mat", bad=(12, 7, 40)),
                expected=Expected(causes=DATA, module=r"tcn\.network\.0\.conv1", lines=("",), sample=0),
            ),
        ),
    ),
    tutorial("02-intermediate/recurrent_neural_network", record(PIXEL, nan("lstm", r"self\.lstm\(x, \(h0, c0\)\)"))),
    tutorial("01-basics/logistic_regression", record(PIXEL, nan("", r"outputs = model\(images\)"))),
    Program(
        name="latent-ode",
        repository="rtqichen/torchdiffeq",
        commit="657943acefa826ef04c025ebeb1ff5e9d60dc268",
        folder="examples",
        command=("latent_ode.py", "--niters", "4"),
        paths=("..",),
        seed=1,
        faults=(
            Fault(
                name="drawn",
                what="a NaN in one drawn series",
                hook={"kind": "numpy", "call": 8, "row": 7, "element": 60, "value": "nan"},
                expected=nan(
                    r"rec\.i2h",
                    r"torch\.cat\(\(x, h\), dim=1\)",
                    r"self\.i2h\(combined\)",
                    r"rec\.forward\(obs, h\)",
                    r"samp_trajs\[:, t, :\]",
                ),
            ),
        ),
    ),
    Program(
        name="maml-sine",
        repository="lmzintgraf/cavia",
        commit="91f093af9d6f463ee651db533f6c2acc637c7e9f",
        folder="regression",
        command=("main.py", "--maml", "--n_iter", "12", "--tasks_per_metaupdate", "3", "--lr_inner", "0.01"),
        faults=(too_fast("--lr_meta", "1e30"),),
    ),
)

GRAPHS = (
    example(
        "gat",
        *("main.py", "--epochs", "4", "--num-heads", "2", "--hidden-dim", "8", "--val-every", "1"),
        data=make.cora("cora"),
        faults=(too_fast("--lr", "1e30"),),
    ),
    Program(
        name="pygcn",
        repository="tkipf/pygcn",
        commit="1600b5b748b3976413d1e307540ccc62605b4d6d",
        folder="pygcn",
        command=("-m", "pygcn.train", "--epochs", "10"),
        paths=("..",),
        data=make.cora("../data/cora"),
        faults=(
            Fault(
                name="file",
                what="a NaN feature of one node in the file",
                data=make.cora("../data/cora", bad={50: "nan"}),
                expected=Expected(causes=DATA, module="gc1", lines=(r"torch\.mm\(input, self\.weight\)",), sample=50),
            ),
        ),
    ),
    Program(
        name="gin",
        repository="weihua916/powerful-gnns",
        commit="9a2ce8ac3e99278307093a464a95caf0fb04b602",
        folder=".",
        command=(
            *("main.py", "--dataset", "RINGS", "--batch_size", "8", "--iters_per_epoch", "4", "--epochs", "3"),
            *("--hidden_dim", "8", "--num_layers", "3"),
        ),
        data=make.small_graphs("RINGS"),
        faults=(too_fast("--lr", "1e25"),),
    ),
)

ROUTES = Program(
    name="routes",
    repository="wouterkool/attention-learn-to-route",
    commit="c9abf41ac2f878a55b20dc7e829bc942bb999631",
    folder=".",
    command=(
        *("run.py", "--graph_size", "6", "--baseline", "exponential", "--batch_size", "8", "--epoch_size", "48"),
        *("--val_size", "16", "--n_epochs", "1", "--embedding_dim", "16", "--hidden_dim", "16"),
        *("--eval_batch_size", "16", "--n_encode_layers", "1", "--no_tensorboard", "--no_progress_bar", "--no_cuda"),
    ),
    environment=OLD_PROTOBUF,
    volatile=(r"\d{8}T\d{6}",),
    faults=(too_fast("--lr_model", "1e25"),),
)
"""Raises by an assertion of its own if a probability is NaN."""

RETURNS = (r"returns = torch\.tensor\(returns\)", r"\(returns - returns\.mean\(\)\)")

LEARNING = (
    ROUTES,
    example(
        "reinforcement_learning",
        "reinforce.py",
        name="reinforce",
        env_steps=300,
        faults=(reward(60, *RETURNS),),
    ),
    example(
        "reinforcement_learning",
        "actor_critic.py",
        name="actor-critic",
        env_steps=300,
        faults=(
            reward(60, *RETURNS),
            reward(60, r"self\.affine1\(x\)", kind="observation", module="affine1"),
        ),
    ),
    cleanrl(
        "ppo.py",
        *("--total-timesteps", "512", "--num-envs", "2", "--num-steps", "64"),
        faults=(
            reward(
                40,
                r"rewards\[step\] = ",
                r"delta = rewards\[t\]",
                r"b_advantages\[mb_inds\]",
                r"mb_advantages",
                r"b_returns\[mb_inds\]",
            ),
        ),
    ),
    cleanrl(
        "dqn.py",
        *("--total-timesteps", "600", "--learning-starts", "100", "--buffer-size", "600", "--batch-size", "16"),
        faults=(reward(120, r"td_target = data\.rewards", r"F\.mse_loss\(td_target, old_val\)"),),
    ),
    cleanrl(
        "td3_continuous_action.py",
        *("--env-id", "Pendulum-v1", "--total-timesteps", "160", "--learning-starts", "100"),
        *("--buffer-size", "600", "--batch-size", "16"),
        faults=(reward(110, r"data\.rewards", r"F\.mse_loss\(qf1_a_values, next_q_value\)"),),
    ),
    cleanrl(
        "sac_continuous_action.py",
        *("--env-id", "Pendulum-v1", "--total-timesteps", "160", "--learning-starts", "100"),
        *("--buffer-size", "600", "--batch-size", "16"),
        faults=(reward(110, r"data\.rewards", r"F\.mse_loss\(qf1_a_values, next_q_value\)"),),
    ),
)

BARE = (
    example(
        "regression",
        "main.py",
        seed=1,
        faults=(
            Fault(
                name="drawn",
                what="a NaN among the drawn inputs",
                hook={"kind": "randn", "call": 12, "row": 3, "value": "nan"},
                expected=nan(
                    "",
                    r"make_features\(random\)",
                    r"x \*\* i",
                    r"torch\.randn\(batch_size\)",
                    r"x = x\.unsqueeze",
                ),
            ),
        ),
    ),
    Program(
        name="bare-autograd",
        repository="jcjohnson/pytorch-examples",
        commit="0003fcdc606a79951e53bf8f46f8574fa4739f23",
        folder="autograd",
        command=("two_layer_net_autograd.py",),
        weights=("w1", "w2"),
        seed=1,
        faults=(
            Fault(
                name="drawn",
                what="a NaN in the drawn inputs",
                hook={"kind": "randn", "call": 1, "row": 3, "value": "nan"},
                expected=nan("", r"x = torch\.randn\(N, D_in", r"x\.mm\(w1\)"),
            ),
        ),
    ),
    Program(
        name="bare-optim",
        repository="jcjohnson/pytorch-examples",
        commit="0003fcdc606a79951e53bf8f46f8574fa4739f23",
        folder="nn",
        command=("two_layer_net_optim.py",),
        seed=1,
        faults=(
            Fault(
                name="drawn",
                what="a NaN in the drawn targets",
                hook={"kind": "randn", "call": 2, "row": 3, "value": "nan"},
                expected=nan("", r"y = torch\.randn\(N, D_out", r"loss_fn\(y_pred, y\)"),
            ),
        ),
    ),
)
