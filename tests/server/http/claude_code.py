"""Bodies as Claude Code sends them (2.1.197)."""

from __future__ import annotations

from typing import Any

BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-system-2026-04-07,effort-2025-11-24"
)
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": BETAS,
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "none",
    "x-app": "cli",
    "User-Agent": "claude-cli/2.1.197 (external, cli)",
    "X-Stainless-Retry-Count": "0",
}
PATH = "/v1/messages?beta=true"
CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_DRAFT = "http://json-schema.org/draft-07/schema#"


def tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": _DRAFT,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "input_schema": schema}


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "default": False, "description": description}


_TODO = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
        "activeForm": {"type": "string", "minLength": 1},
    },
    "required": ["content", "status", "activeForm"],
    "additionalProperties": False,
}
_OPTION = {
    "type": "object",
    "properties": {"label": _text("What is shown."), "description": _text("What it means.")},
    "required": ["label", "description"],
    "additionalProperties": False,
}
_QUESTION = {
    "type": "object",
    "properties": {
        "question": _text("The whole question."),
        "header": _text("A short label."),
        "options": {"type": "array", "items": _OPTION, "minItems": 2, "maxItems": 4},
        "multiSelect": _flag("Whether several fit."),
    },
    "required": ["question", "header", "options", "multiSelect"],
    "additionalProperties": False,
}
_NUMBER = {"type": "number", "exclusiveMinimum": 0}
_LINES = {"type": "number", "description": "A number of lines."}
TOOLS = [
    tool(
        "Task",
        "Start another agent.",
        ["prompt"],
        prompt=_text("The task."),
        model=_text("Which", enum=["a", "b"]),
    ),
    tool(
        "Bash",
        "Run a command.\n\nIt has no terminal.",
        ["command"],
        command=_text("The command."),
        timeout=_NUMBER,
        run_in_background=_flag("Do not wait."),
    ),
    tool(
        "Glob", "Find files.", ["pattern"], pattern=_text("Such as **/*.py"), path=_text("Where.")
    ),
    tool(
        "Grep",
        "Search in files.",
        ["pattern"],
        pattern=_text("A regular expression."),
        output_mode={"type": "string", "enum": ["content", "count"]},
        **{"-A": _LINES, "-i": _flag("Any case.")},
    ),
    tool(
        "ExitPlanMode",
        "End the plan.",
        [],
        allowed={
            "type": "array",
            "items": {"type": "object", "properties": {}, "additionalProperties": {}},
        },
    ),
    tool(
        "Read",
        "Read a file.",
        ["file_path"],
        file_path=_text("An absolute path."),
        offset=_LINES,
        limit=_LINES,
    ),
    tool(
        "Edit",
        "Replace text.",
        ["file_path", "old", "new"],
        file_path=_text("Which."),
        old=_text("This."),
        new=_text("By this."),
        all=_flag("Each."),
    ),
    tool(
        "Write",
        "Write a file.",
        ["file_path", "content"],
        file_path=_text("Which."),
        content=_text("What."),
    ),
    tool(
        "NotebookEdit",
        "Edit a cell.",
        ["path"],
        path=_text("Which."),
        mode={"type": "string", "enum": ["replace", "insert", "delete"]},
    ),
    tool("WebFetch", "Fetch a page.", ["url"], url=_text("Which.", format="uri")),
    tool("TodoWrite", "Keep a list.", ["todos"], todos={"type": "array", "items": _TODO}),
    tool(
        "WebSearch",
        "Search.",
        ["query"],
        query=_text("What.", minLength=2),
        domains={"type": "array", "items": {"type": "string"}},
    ),
    tool("BashOutput", "What a command has said.", ["id"], id=_text("Which.")),
    tool("KillShell", "End a command.", ["id"], id=_text("Which.")),
    tool(
        "AskUserQuestion",
        "Ask.",
        ["questions"],
        questions={"type": "array", "items": _QUESTION, "minItems": 1, "maxItems": 4},
        answers={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    tool("Skill", "Use a skill.", ["skill"], skill=_text("Which.")),
    tool(
        f"mcp__a-server__{'long_' * 15}name",
        "Of somebody's server.",
        [],
        value={"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
    ),
]
AGENTS = {"role": "system", "content": "Available agent types for the Agent tool:\n- claude"}
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli;"},
    {"type": "text", "text": "You are Claude Code, a command line tool.", **CACHED},
    {"type": "text", "text": "\nHelp with the code.\n\n# Tone\n- Be brief.\n" * 20, **CACHED},
]


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A streamed request of the main loop."""
    return {
        "model": "fake",
        "messages": [*messages],
        "system": SYSTEM,
        "tools": TOOLS,
        "metadata": {"user_id": "user_1234_account__session_5678"},
        "max_tokens": 32_000,
        "thinking": {"budget_tokens": 31_999, "type": "enabled"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }
