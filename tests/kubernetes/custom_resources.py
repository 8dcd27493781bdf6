"""Schemas of the custom resources in configs/kubernetes: the fields that we use, as their
definitions have them, and no others. kubernetes-validate has those of Kubernetes itself.

Of LeaderWorkerSet 0.10, the Prometheus operator 0.93, KEDA 2.20, Gateway API 1.6 and its inference
extension 1.6, llm-d's router 0.10. A field that is new here is looked up there first.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
SECONDS: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}


def closed(*required: str, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(schema: Schema, most: int = 16) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": most}


def choice(*values: str) -> Schema:
    return {"enum": list(values)}


def resource(spec: Schema) -> Schema:
    metadata = closed("name", name=NAME, labels=LABELS)
    parts = {"apiVersion": TEXT, "kind": TEXT, "metadata": metadata, "spec": spec}
    return closed(*parts, **parts)


SELECTOR: Schema = closed("matchLabels", matchLabels={**LABELS, "minProperties": 1})
POD_TEMPLATE: Schema = {"type": "object"}  # Kubernetes' own: test_schemas.py validates it as that

LEADER_WORKER_SET = closed(
    "leaderWorkerTemplate",
    replicas=COUNT,
    rolloutStrategy=closed(
        "type",
        type=choice("RollingUpdate"),
        rollingUpdateConfiguration=closed(maxUnavailable=COUNT, maxSurge=COUNT, partition=COUNT),
    ),
    startupPolicy=choice("LeaderCreated", "LeaderReady"),
    leaderWorkerTemplate=closed(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy=choice(
            "Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"
        ),
        leaderTemplate=POD_TEMPLATE,
        workerTemplate=POD_TEMPLATE,
    ),
)

POD_MONITOR = closed(
    "selector",
    "podMetricsEndpoints",
    selector=SELECTOR,
    podMetricsEndpoints=listed(
        closed(port=TEXT, path=TEXT, interval=SECONDS, scheme=choice("http", "https"))
    ),
)

SCALED_OBJECT = closed(
    "scaleTargetRef",
    "triggers",
    scaleTargetRef=closed("name", name=NAME, kind=TEXT, apiVersion=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    triggers=listed(
        closed(
            "type",
            "metadata",
            type=choice("prometheus"),
            metadata=closed(
                "serverAddress",
                "query",
                "threshold",
                serverAddress={"type": "string", "format": "uri"},
                query=TEXT,
                threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
            ),
        )
    ),
    fallback=closed(
        "failureThreshold",
        "replicas",
        failureThreshold=COUNT,
        replicas=COUNT,
        behavior=choice(
            "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
        ),
    ),
    # What is in there is Kubernetes' own: test_schemas.py validates it as that.
    advanced=closed(horizontalPodAutoscalerConfig=closed(behavior={"type": "object"})),
)

INFERENCE_POOL = closed(
    "selector",
    "targetPorts",
    "endpointPickerRef",
    selector=SELECTOR,
    targetPorts=listed(closed("number", number=PORT), most=8),
    endpointPickerRef=closed(
        "name",
        "port",  # of a Service, which is the kind unless another is said
        name=NAME,
        port=closed("number", number=PORT),
        failureMode=choice("FailOpen", "FailClose"),
    ),
)

HTTP_ROUTE = closed(
    parentRefs=listed(closed("name", name=NAME, namespace=NAME)),
    rules=listed(
        closed(
            matches=listed(
                closed(
                    path=closed(type=choice("Exact", "PathPrefix", "RegularExpression"), value=TEXT)
                )
            ),
            backendRefs=listed(closed("name", group=TEXT, kind=TEXT, name=NAME, port=PORT)),
            timeouts=closed(request=SECONDS, backendRequest=SECONDS),
        )
    ),
)

CUSTOM_RESOURCES = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): resource(LEADER_WORKER_SET),
    ("monitoring.coreos.com/v1", "PodMonitor"): resource(POD_MONITOR),
    ("keda.sh/v1alpha1", "ScaledObject"): resource(SCALED_OBJECT),
    ("inference.networking.k8s.io/v1", "InferencePool"): resource(INFERENCE_POOL),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): resource(HTTP_ROUTE),
}

# Not a resource: the file that llm-d's endpoint picker reads.
SPEC: Schema = {"type": "string", "pattern": r"^[a-zA-Z_:][\w:]*(\{.*\})?$"}  # of a metric
ENGINE_CONFIG = closed(
    "name",
    name=TEXT,
    queuedRequestsSpec=SPEC,
    runningRequestsSpec=SPEC,
    kvUsageSpec=SPEC,
    loraSpec=SPEC,
    cacheInfoSpec=SPEC,
)
PLUGIN_PARAMETERS = {
    "metrics-data-source": closed(interval=SECONDS, path=TEXT, scheme=choice("http", "https")),
    "core-metrics-extractor": closed(defaultEngine=TEXT, engineConfigs=listed(ENGINE_CONFIG)),
    "queue-scorer": closed(),
    "kv-cache-utilization-scorer": closed(),
    "prefix-cache-scorer": closed(),
}
ENDPOINT_PICKER_CONFIG = closed(
    "apiVersion",
    "kind",
    "schedulingProfiles",
    apiVersion=choice("llm-d.ai/v1alpha1"),
    kind=choice("EndpointPickerConfig"),
    plugins=listed(
        {
            "oneOf": [
                closed("type", type=choice(name), parameters=parameters)
                for name, parameters in PLUGIN_PARAMETERS.items()
            ]
        }
    ),
    schedulingProfiles=listed(
        closed(
            "name",
            name=TEXT,
            plugins=listed(closed("pluginRef", pluginRef=choice(*PLUGIN_PARAMETERS), weight=COUNT)),
        )
    ),
)
