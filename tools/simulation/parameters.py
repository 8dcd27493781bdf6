"""What the generated traces are made of. Every figure is fixed before any policy is tuned on them.

Where figures come from: LMSYS-Chat-1M and WildChat (turns and message lengths of people),
"KVCache Cache in the Wild" (arXiv 2506.02634: 80 % of a chat service's reuses within ten minutes,
of an API service's within ten seconds; API reuse is nearly all system prompts), Mooncake's
published traces (FAST '25: mean prompts of 8,600 and 12,000 tokens, mean answers of 180 and 340),
and published traces of coding agents (some hundred to some thousand new tokens a step). They are
round on purpose: a real trace differs from day to day by more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

STEP_SECONDS = 0.025  # one engine step: the time between two tokens of a stream at 40 tokens/s
MAX_CONTEXT = 32_768  # prompt and answer together, in every trace


def steps(seconds: float) -> int:
    """Engine steps in so many seconds."""
    return round(seconds / STEP_SECONDS)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths and waiting times of people and programs: many small ones and a long tail."""

    median: float
    sigma: float  # of the logarithm
    low: float
    high: float

    def draw(self, rng: Random) -> float:
        return min(self.high, max(self.low, rng.lognormvariate(math.log(self.median), self.sigma)))

    def tokens(self, rng: Random) -> int:
        return round(self.draw(rng))

    def steps(self, rng: Random) -> int:
        """A waiting time, given in seconds."""
        return steps(self.draw(rng))


@dataclass(frozen=True, slots=True)
class Chat:
    """People who talk to a few assistants."""

    # About 5 requests a second once sessions come and go in balance, which takes hours: some
    # thousand conversations are then open.
    sessions_per_second: float = 1.0
    # Assistants explain their rules and tools in one to four thousand tokens. The most popular
    # one of a service gets half of the traffic.
    system_prompts: tuple[int, ...] = (1_800, 1_200, 2_600, 4_000)
    system_weights: tuple[float, ...] = (0.5, 0.25, 0.15, 0.1)
    # A geometric number of turns: most conversations are short, some are very long.
    mean_turns: float = 5.0
    # People type little (WildChat's mean is 295 tokens), but a third of the conversations are about
    # a document, and now and then one is pasted later on. So most of a prompt is nobody else's.
    message: LogNormal = LogNormal(60, 1.3, 4, 6_000)
    document_share: float = 0.3
    document: LogNormal = LogNormal(5_000, 0.8, 500, 20_000)
    attachment_share: float = 0.08
    attachment: LogNormal = LogNormal(2_500, 0.8, 300, 12_000)
    answer: LogNormal = LogNormal(230, 0.85, 8, 3_000)  # mean 330; WildChat's is 440, LMSYS's 215
    # Reading and typing, and coming back after lunch: 80 % within ten minutes, as arXiv 2506.02634
    # has it for a chat service.
    think: LogNormal = LogNormal(75, 2.5, 2, 21_600)
    regenerate_share: float = 0.04  # of follow-ups: the same prompt again, soon
    edit_share: float = 0.03  # of follow-ups: an earlier message is written anew
    regenerate_delay: LogNormal = LogNormal(10, 0.8, 1, 300)


@dataclass(frozen=True, slots=True)
class Agents:
    """Programs that call tools in a loop, and sometimes set sub-agents to work."""

    # About 6 requests a second; nearly a hundred agents are at work or wait for their users.
    sessions_per_second: float = 0.15
    # Types of agents; each has one system prompt with its tools, and one for its sub-agents.
    types: int = 6
    type_exponent: float = 1.0  # Zipf: one or two types do most of the work
    system_tokens: tuple[int, int] = (2_000, 4_000)
    sub_system_tokens: tuple[int, int] = (1_500, 3_000)
    task: LogNormal = LogNormal(350, 1.0, 30, 6_000)
    steps: tuple[int, int] = (10, 60)
    sub_steps: tuple[int, int] = (4, 15)
    # A step: some reasoning and a call, then the tool's output: files, logs, search results.
    answer: LogNormal = LogNormal(140, 0.8, 15, 2_500)
    output: LogNormal = LogNormal(330, 1.2, 10, 8_000)
    # Most tools answer in seconds, builds and tests take minutes.
    tool_delay: LogNormal = LogNormal(1.5, 1.3, 0.05, 300)
    pause_share: float = 0.03  # of steps: the user is asked first
    pause: LogNormal = LogNormal(90, 1.5, 5, 3_600)
    # The context is summed up when the next step might not fit.
    compact_above: int = 28_000
    summary: LogNormal = LogNormal(900, 0.4, 300, 2_500)
    sub_agents_share: float = 0.02  # of steps
    sub_agents: tuple[int, int] = (2, 4)
    task_delay: LogNormal = LogNormal(5, 1.0, 0.5, 60)  # until the user's task is there


@dataclass(frozen=True, slots=True)
class Forks:
    """Many continuations of one text: rollouts of reinforcement learning, and tree search."""

    # Together about 1.5 requests and 6 sequences a second: many samples decode at once.
    groups_per_second: float = 0.12
    trees_per_second: float = 0.012
    # Rollouts. One instruction for each environment, then a problem with its files or examples.
    environments: int = 5
    system_tokens: tuple[int, int] = (600, 1_800)
    problem: LogNormal = LogNormal(3_200, 0.6, 300, 12_000)
    samples: int = 16
    answer: LogNormal = LogNormal(450, 0.7, 20, 3_000)
    # Some problems are sampled once more: all samples were right or all were wrong.
    again_share: float = 0.06
    # Some environments answer, and every sample goes on by itself for some turns.
    multi_turn_share: float = 0.25
    turns: tuple[int, int] = (2, 4)
    feedback: LogNormal = LogNormal(250, 1.0, 10, 4_000)
    feedback_delay: LogNormal = LogNormal(1.0, 1.0, 0.05, 60)
    # Tree search: nodes are paragraphs of reasoning; several are expanded at once, the chosen ones
    # by the upper confidence bound of a random value, so that earlier nodes are visited again.
    rounds: tuple[int, int] = (10, 30)
    expansions: int = 3  # a round
    children: tuple[int, int] = (2, 4)
    thought: LogNormal = LogNormal(170, 0.5, 20, 800)
    leaf_share: float = 0.1  # of nodes: they end the argument
    exploration: float = 0.5
    judge_delay: LogNormal = LogNormal(0.5, 0.7, 0.05, 10)  # until a round's nodes have values


@dataclass(frozen=True, slots=True)
class Shared:
    """Applications behind an API: a long instruction, a short question, one answer."""

    # About 8.7 requests a second.
    sessions_per_second: float = 8.0
    prompts: int = 500
    # Popularity of applications is Zipf's; 1 is the exponent of nearly everything that is counted.
    exponent: float = 1.0
    prompt_tokens: tuple[int, int] = (2_000, 8_000)
    question: LogNormal = LogNormal(450, 1.2, 8, 8_000)  # with the passages that it is about
    answer: LogNormal = LogNormal(140, 0.8, 4, 1_500)
    second_turn_share: float = 0.08
    second_turn_delay: LogNormal = LogNormal(15, 1.0, 1, 600)


@dataclass(frozen=True, slots=True)
class Mixed:
    """All of them at one engine, each at a share of the rate that it has alone."""

    chat: float = 0.4
    agents: float = 0.3
    forks: float = 0.2
    shared: float = 0.25


@dataclass(frozen=True, slots=True)
class TraceParameters:
    chat: Chat = field(default_factory=Chat)
    agents: Agents = field(default_factory=Agents)
    forks: Forks = field(default_factory=Forks)
    shared: Shared = field(default_factory=Shared)
    mixed: Mixed = field(default_factory=Mixed)
