"""Names of config fields in other trainers (transformers, nanoGPT, torchtitan), for error messages."""

ALIASES: dict[str, str] = {
    # optimizer
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr initial_lr matrix_lr learningrate lr_max",
    "optimizer.final_learning_rate": "min_lr lr_min final_lr end_lr min_learning_rate lr_end eta_min",
    "optimizer.warmup_steps": "warmup warmup_iters lr_warmup_steps num_warmup_steps lr_warmup_iters",
    "optimizer.warmup_fraction": "warmup_ratio",
    "optimizer.decay_steps": "lr_decay_steps lr_decay_iters cooldown_steps num_decay_steps warmdown_steps",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style lr_decay_type",
    "optimizer.weight_decay": "wd decoupled_weight_decay adam_weight_decay",
    "optimizer.clip_norm": "grad_clip max_grad_norm clip_grad clip_grad_norm gradient_clipping max_norm "
    "gradient_clip_val grad_clip_norm clip_gradients gradient_clipping_threshold",
    "optimizer.beta1": "adam_beta1 b1 adam_b1",
    "optimizer.beta2": "adam_beta2 b2 adam_b2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.name": "optim optimizer_name optimizer_type opt_type",
    # data
    "data.batch_size": "global_batch_size train_batch_size per_device_train_batch_size micro_batch_size bs "
    "per_device_batch_size local_batch_size device_batch_size total_batch_size mbs batchsize",
    "data.sequence_length": "seq_len seq_length block_size max_seq_len max_seq_length max_length "
    "context_length context_len max_target_length seqlen ctx_len sequence_len cutoff_len "
    "max_sequence_length",
    "data.source": "dataset dataset_name dataset_path data_path train_data train_file train_files",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path vocab_file tokenizer_model",
    # train
    "train.num_steps": "max_steps steps max_iters train_iters num_iterations train_steps num_train_steps "
    "total_steps iterations n_steps max_train_steps training_steps",
    "train.log_every": "log_interval logging_steps log_freq log_every_n_steps log_period print_every "
    "log_steps",
    "train.eval_every": "eval_interval eval_steps eval_freq val_every validation_freq val_check_interval "
    "eval_every_n_steps val_interval evaluation_interval",
    "train.eval_sequences": "eval_iters max_eval_samples eval_batches val_steps",
    "train.checkpoint_every": "save_interval save_steps save_every save_freq checkpoint_interval ckpt_every "
    "checkpoint_period ckpt_interval",
    "train.keep_checkpoints": "save_total_limit keep_latest_k max_to_keep keep_last max_checkpoints",
    "train.init_from": "model_name_or_path pretrained load_parameters_path init_checkpoint load_path "
    "finetune_from base_model pretrained_model_name_or_path",
    "train.seed": "random_seed manual_seed rng_seed init_seed",
    # execution
    "execution.num_microbatches": "grad_accum gradient_accumulation_steps grad_accum_steps "
    "accumulate_grad_batches gradient_accumulation accumulation_steps num_microbatch grad_acc",
    "execution.dtype": "precision mixed_precision bf16 fp16 compute_dtype torch_dtype param_dtype",
    "execution.remat": "gradient_checkpointing activation_checkpointing activation_checkpoint remat_policy "
    "recompute_granularity activation_checkpoint_mode checkpoint_activations",
    "execution.context_devices": "cp context_parallel_size context_parallel_degree cp_size",
    "execution.node_devices": "ep expert_parallel_size expert_parallel_degree expert_model_parallel_size "
    "ep_size",
    # model
    "model.num_hidden_layers": "n_layer n_layers num_layers depth layers",
    "model.hidden_size": "n_embd d_model dim emb_dim model_dim embed_dim hidden_dim base_emb_dim",
    "model.num_attention_heads": "n_head n_heads num_heads num_query_heads base_num_query_heads",
    "model.num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads num_query_groups base_num_kv_heads",
    "model.moe_intermediate_size": "ffn_hidden_size intermediate_size ffn_dim mlp_dim base_mlp_dim "
    "moe_inter_dim",
    "model.num_experts": "n_experts n_routed_experts num_local_experts num_moe_experts",
    "model.rms_norm_eps": "norm_eps norm_epsilon layernorm_epsilon layer_norm_eps",
    "model.rope_theta": "rotary_base rope_base rope_max_timescale",
    "model.sliding_window": "window_size sliding_window_size attention_window",
    "model.max_position_embeddings": "n_ctx n_positions max_positions max_position",
    # others
    "run_folder": "output_dir out_dir save_dir checkpoint_dir run_dir base_output_directory dump_folder "
    "ckpt_dir",
    "log.wandb": "wandb_log use_wandb report_to enable_wandb with_tracking",
    "log.project": "wandb_project project_name",
    "log.name": "wandb_run_name run_name wandb_name",
    "lora.rank": "lora_r lora_rank lora_dim",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target lora_target_modules",
    "lora.rslora": "use_rslora",
    "lora.dora": "use_dora",
    "lora.b_learning_rate_ratio": "loraplus_lr_ratio lora_plus_lr_ratio",
    "train.epochs": "num_train_epochs num_epochs n_epochs",
    "dpo.beta": "dpo_beta pref_beta",
    "dpo.loss_type": "pref_loss dpo_loss_type",
    "dpo.label_smoothing": "dpo_label_smoothing label_smoothing_factor",
    "ema.decay": "ema_decay ema_beta ema_rate",
    "distillation.teacher": "teacher_model teacher_model_name_or_path teacher_model_path",
}
"""Space-separated names in other trainers, by the dotted name of our field."""
FIELD_BY_ALIAS = {name: field for field, names in ALIASES.items() for name in names.split()}


def field_by_alias(name: str) -> str | None:
    """The dotted name of our field that has this name in another trainer; None for an unknown name.

    Args:
      name: name without a section, spelled like a field or like an option, such as "lr" or "seq-len".
    """
    # Options are typed with dashes and in any case.
    return FIELD_BY_ALIAS.get(name.lower().replace("-", "_"))
