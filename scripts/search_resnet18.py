"""Search for the learning rate and the batch size of ResNet-18 on the digits with Ray Tune: pip install '.[cpu,train,ray]'.

    python scripts/search_resnet18.py --scheduler asha --trials 20 --epochs 8
    python scripts/search_resnet18.py --scheduler pbt --trials 8 --gpus 1
    python scripts/search_resnet18.py --resume

Each trial runs in a process of its own. Ray gives it its cores and GPUs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Optional

import click


def train(config: Dict[str, Any]) -> None:
    """Train one trial. Ray has already set CUDA_VISIBLE_DEVICES and the threads, so MXNet is imported here."""
    import gluon_mgpu as mgpu
    from mxnet import gluon, init

    digits, most = mgpu.data.load_digits(), config["num_examples"]
    train_iter = mgpu.data.ArrayLoader(
        digits.train_images[:most], digits.train_labels[:most], config["batch_size"], shuffle=True, seed=0
    )
    test_iter = mgpu.data.ArrayLoader(digits.test_images[:most], digits.test_labels[:most], 256)
    with mgpu.use_devices(config["devices"]) as ctx:
        mgpu.seed_everything(0)  # in this thread: Ray does not run a trial in the main one
        net = mgpu.models.resnet18(digits.num_classes)
        net.initialize(init.Xavier(), ctx=ctx)
        net.hybridize(static_alloc=True, static_shape=True)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": config["lr"], "momentum": 0.9})
        saves = mgpu.Checkpoint(mgpu.tuning.trial_folder())
        callbacks = [saves, mgpu.tuning.ReportToTune(saves)]
        options: Dict[str, Any] = {"resume": "auto"}
        mgpu.fit(net, loss, trainer, train_iter, test_iter, epochs=config["epochs"], callbacks=callbacks, **options)


@click.command(context_settings={"show_default": True})
@click.option("--scheduler", type=click.Choice(["asha", "pbt"]), default="asha", help="Ray's scheduler.")
@click.option("--trials", type=click.IntRange(1), default=20)
@click.option("--epochs", type=click.IntRange(1), default=8, help="Of each trial, at most.")
@click.option("--cpus", type=click.IntRange(1), default=1, help="Cores of each trial: CPU contexts if no GPUs.")
@click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs of each trial.")
@click.option("--num-examples", type=click.IntRange(32), help="Train and test on the first so many images. By default on all.")
@click.option("--seed", type=int, default=0, help="Of the hyper-parameters.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/search"))
@click.option("--resume", is_flag=True, help="Continue the search in --output; the other options are those of its start.")
def main(
    scheduler: str,
    trials: int,
    epochs: int,
    cpus: int,
    gpus: int,
    num_examples: Optional[int],
    seed: int,
    output: Path,
    resume: bool,
) -> None:
    """Search for hyper-parameters, and print the best trial."""
    if find_spec("ray") is None:
        raise click.ClickException("got no Ray; expected the extra ray. Run pip install '.[cpu,train,ray]'.")
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
    from ray.tune.search.basic_variant import BasicVariantGenerator

    trainable = tune.with_resources(train, {"cpu": cpus, "gpu": gpus})
    if resume:
        tuner = tune.Tuner.restore(str(output.absolute()), trainable, resume_unfinished=True, restart_errored=True)
    else:
        rates = tune.loguniform(3e-3, 3e-1)
        interval = max(1, epochs // 4)  # epochs between two changes of a population
        if scheduler == "asha":  # stops the worst two thirds after 1, 3, 9, ... epochs
            chosen: Any = ASHAScheduler(time_attr="epoch", max_t=epochs, grace_period=1, reduction_factor=3)
        else:  # lets the worst trials continue from the best ones, with other learning rates
            chosen = PopulationBasedTraining("epoch", perturbation_interval=interval, hyperparam_mutations={"lr": rates})
        space = {
            "lr": rates,
            "batch_size": tune.choice([32, 64, 128]),
            "epochs": epochs,
            "num_examples": num_examples,
            "devices": f"gpu*{gpus}" if gpus else f"cpu*{cpus}",
        }
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="test_accuracy",
                mode="max",
                num_samples=trials,
                scheduler=chosen,
                search_alg=BasicVariantGenerator(random_state=seed),
                reuse_actors=False,  # each trial in a new process
            ),
            run_config=tune.RunConfig(
                name=output.name,
                storage_path=str(output.absolute().parent),
                failure_config=tune.FailureConfig(max_failures=3),  # such as a killed process
                checkpoint_config=tune.CheckpointConfig(num_to_keep=interval + 2),
            ),
        )
    best: Any = tuner.fit().get_best_result()
    found, accuracy = best.config, best.metrics["test_accuracy"]
    print(f"best: lr {found['lr']:.4g}, batch size {found['batch_size']}: test accuracy {accuracy:.4f}")
    print(f"checkpoint: {best.checkpoint.path}/best")


if __name__ == "__main__":
    main()
