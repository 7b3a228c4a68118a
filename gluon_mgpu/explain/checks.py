"""Find the entry of an error that no entry names: by the source file that raised it, by its condition, or by its words."""

from __future__ import annotations

import re

ANY_CHECK = "operator-check-failed"
_SOURCE = re.compile(r"([\w.+/\\-]+\.(?:cc|h|cuh?)):\d+[:\]]?\s")
_FOLDERS = re.compile(r"(?:^|[/\\])(?:src|include|mshadow|nnvm|ps-lite|operator)[/\\]")  # of MXNet
_CORE = re.compile(
    r"(?:^|[/\\])(?:nnvm|executor|imperative|engine|storage|c_api|runtime|common|ndarray)[/\\.]|src[/\\](?:symbol|core|pass)"
)
_CONDITION = re.compile(
    r"Check (?:failed|\s*notnull):?\s+(.+?)"
    r"(?: \([^()]* vs\. |:? [A-Z][a-z]|: |(?<=\)) (?=[A-Za-z]{2,} [a-z])|$)"
)
_FILES = {  # what the files of MXNet and ps-lite are about; the first one that fits counts, here and below
    r"cpu_device_storage": "host-out-of-memory",
    r"cpu_shared_storage": "shared-memory",
    r"pooled_storage|gpu_device_storage": "gpu-out-of-memory",
    r"iter_batchloader": "image-channels",
    r"image_(?:det_)?aug": "image-smaller-than-crop",
    r"io/image_io": "image-not-read",
    r"io/iter_image_(?:det_)?recordio": "record-labels",
    r"io/iter_(?:csv|libsvm)|sparse_batch": "table-rows",
    r"io/iter_mnist": "invalid-params-file",
    r"multibox|bounding_box|proposal|roi_align|rcnn": "empty-labels",
    r"quantiz|subgraph[/\\]mkldnn|intgemm": "quantization",
    r"subgraph|tvmop|tensorrt": "internal-check",
    r"mkldnn|dnnl": "layout-not-on-cpu",
    r"operator[/\\]custom": "custom-op",
    r"operator[/\\]control_flow": "symbol-in-hybrid-network",
    r"operator[/\\](?:numpy[/\\])?random": "operator-arguments",
    r"dot-inl|[/\\]dot\b": "dot-shapes",
    r"la_op|linalg|lapack": "linear-algebra",
    r"sparse|cast_storage|square_sum": "sparse-arrays",
    r"concat": "concat-shapes",
    r"json": "symbol-json-unreadable",
    r"kvstore[/\\](?:gpu_topology|comm)": "peer-access",
    r"kvstore|kv_app": "kvstore-keys",
    r"(?:^|[/\\])(?:van|postoffice|customer|manager|(?:zmq|ibverbs|fabric)_van|resender|network_utils)\.": "ps-connection",
    r"profiler?[/\\.]": "profiler",
    r"image[/\\]": "image-channels",
}
_CONDITIONS = {  # what a condition is about
    r"CheckContiguous|\.attrs\.count|storage_id|dispatch_mode|node_?id|num_pending|2index|_map\w*(?:\.|->)end": "internal-check",
    r"zmq|(?:send|recv)_bytes|van_|senders_|ParseFromArray\(meta|my_node": "ps-connection",
    r"dptr_? [!=]=": "internal-check",
    r"handle_ownership|OwnHandle": "cublas-failed",
    r"workspace": "convolution-workspace",
    r"InferNodeShapes|infer_shape|shape_is_known": "shapes-unknown",
    r"n_?dim_?\b": "wrong-number-of-axes",
    r"d_?type|type_flag|InferType|type_assign": "dtype-mismatch",
    r"s_?types?\b|storage_type\b|aux_(?:shape|type)\(|dense": "sparse-arrays",
    r"dev_mask|dev_id|\bctx\b|\bdevice\b": "mixed-devices",
    r"in_args?_map|aux_states?_map|arg_names?|ctx_map": "module-inputs",
    r"req\w* [!=]= k|kWriteInplace|\binplace": "output-request",
    r"kernel|ksize": "kernel-larger-than-input",
    r"layout|TENSOR_NCHW": "layout-not-on-cpu",
    r"label|num_classes": "empty-labels",
    r"param_?\b|(?:in|out)_data|num_inputs|inputs\b|_attrs\b|kwargs|\bargs\b": "operator-arguments",
    r"index|idx|\baxis|\baxes|begin|(?<![.>])\bend\b": "index-out-of-range",
    r"shape|\bsize\b|\bSize\b|length|dim": "shape-inconsistent",
}
_UNSUPPORTED = r"unknown|unsupported|not (?:\w+ )?support|only support|impl(?:em|m|im)ented|only (?:work|valid|available)"
_WORDS = {  # what the words after a condition, or of a message without one, say
    r"sli(?:ce|cing)|out of (?:range|bounds?)|exceed": "index-out-of-range",
    rf"(?:{_UNSUPPORTED}).*\b(?:d?type|float16|fp16|int8)": "dtype-not-supported",
    r"stor(?:age|e) type|sparse|\bcsr\b|\brsp\b|row_sparse": "sparse-arrays",
    r"(?:on|for) (?:the )?cpu|cudnn|cuda version": "layout-not-on-cpu",
    rf"{_UNSUPPORTED}|expects?\b|must\b|should\b": "operator-arguments",
}
_REFUSES = re.compile(  # an error of Python that refuses an argument
    r"(?:Value|Type|Assertion|Runtime|NotImplemented|Attribute)Error\b.*?\b(?:must|should|expect\w*|invalid|unknown|unsupported|"
    r"unrecognized|(?:not|only) (?:\w+ )?(?:support|accept|allow|implement|valid|available)\w*|requires?|needs?|cannot|can't|"
    r"(?:doesn't |does not |don't |not |mis)match|divisible|already|either|specified|at least one|exceed\w*|incompatible|"
    r"inappropriate|provide\w*|different (?:from|number)|differs? from|one of|multiples? of|(?:larg|great|small)er than)",
    re.IGNORECASE | re.DOTALL,
)
BARE_ASSERTION = re.compile(r"\bassert .+ AssertionError:?$")  # a check of Python without a message
_FIELD = re.compile(  # words of this field, of which a message of another program has none
    r"tensors?\b|ndarrays?\b|mxnet|gluon|horovod|ndim|\baxis\b|\baxes\b|dtype|\bshape\b|batch(?:_| ?size|\b)|kernel|channels?\b|"
    r"strides?\b|\blayout\b|lstm|\brnn\b|\bgru\b|dropout|embed|\bvocab|tokeni|bert\b|anchor|bbox|bounding box|heatmap|"
    r"backbone|resnet|hidden|num_\w+|learning.rate|\blr\b|momentum|optimi[sz]er|epochs?\b|gradient|\bgrads?\b|out_grads|"
    r"hybrid|symbol|forecast|time series|quantile|likelihood|prediction_length|context_length|\bfreq|kvstore|contexts?\b|"
    r"\bctx\b|gpus?\b|pooler|bucket|convolution|no_bias|sparse|N?CHW|HWC|stype|pretrained|\barrays?\b|quantiz|calib|augment|"
    r"\brois?\b|imgrec|state_info|crop_size|units\b|conv\d?d?\b|data_shape|image size|data(?:set|loader)|rcnn\b|yolo|\bssd\b|"
    r"sampler|checkpoint|(?:src|tgt)_|sequence length|beam|layers?\b.*\bnum|norm_layer|classes\b.*\bnum|num.*\bclass",
    re.IGNORECASE,
)
_LIBRARY = re.compile(  # a frame of it raised the error; a folder named mxnet may also be one of the user's
    r"(?:(?:packages|python[\d.]*|\.egg|3rdparty)[/\\]mxnet|[/\\](?:gluon(?:cv|nlp|ts)|autogluon|sockeye|insightface|d2l|horovod))[/\\][\w/\\]+\.py"
)
_SAYS_WHY = re.compile(r"(?:Value|Type|Assertion|Runtime|NotImplemented)Error: \W*(?:\w+\W+){2}\w+")


def entry_of_check(text: str, frame: str = "") -> str:
    """Return the name of the entry that fits the file, condition or words of a check, or a refused argument; "" if none does."""
    source, check = _SOURCE.search(text), _CONDITION.search(text)
    path, condition = source.group(1) if source else "", check.group(1) if check else ""
    words = text[check.end() :] if check else text
    if BARE_ASSERTION.search(text):
        return "assertion"
    if not check and not _FOLDERS.search(path):
        refused = (_REFUSES.search(text) and _FIELD.search(text)) or (_SAYS_WHY.search(text) and _LIBRARY.search(frame))
        return "argument-value" if refused else ""
    for table, part, flags in ((_FILES, path, 0), (_CONDITIONS, condition, 0), (_WORDS, words, re.IGNORECASE)):
        for pattern, name in table.items():
            if re.search(pattern, part, flags):
                return name
    if _CORE.search(path):
        return "internal-check"
    said = re.search(r"operator[/\\]", path) and re.search(r"[a-z]{3,} [a-z]{2,}", words)
    return "operator-arguments" if said else ANY_CHECK
