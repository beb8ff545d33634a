"""What the tasks with tools are made of: tools, what users ask of them, values of parameters."""

from typing import Any

from lab.embedded.tables import split


def tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """An OpenAI tool; each parameter is written "type: description", all of them required."""
    properties: dict[str, Any] = {}
    for key, text in parameters.items():
        kind, _, about = text.partition(": ")
        properties[key] = {"type": kind, "description": about}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }


TOOLS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "get_weather": (
        tool("get_weather", "Get the current weather of a city.", city="string: Name of the city"),
        (
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Is it warm in {city}?",
        ),
        "It is {result_degrees} degrees and {result_sky} in {city}.",
    ),
    "get_time": (
        tool("get_time", "Get the local time of a city.", city="string: Name of the city"),
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "Which time do they have in {city} now?",
        ),
        "It is {result_time} in {city}.",
    ),
    "set_timer": (
        tool("set_timer", "Start a timer.", minutes="integer: Duration in minutes"),
        (
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "Remind me in {minutes} minutes.",
        ),
        "The timer is set for {minutes} minutes.",
    ),
    "send_message": (
        tool(
            "send_message",
            "Send a message to a person.",
            recipient="string: Who receives it",
            text="string: What it says",
        ),
        (
            "Send {recipient} the message: {text}",
            "Tell {recipient} this: {text}",
            "Write to {recipient}: {text}",
        ),
        "I sent your message to {recipient}.",
    ),
    "search": (
        tool("search", "Search the web.", query="string: What to search for"),
        (
            "Search for {query}",
            "Search the web for {query}",
            "Look up {query}",
        ),
        "I found {result_count} results for {query}.",
    ),
    "convert_currency": (
        tool(
            "convert_currency",
            "Convert an amount of money.",
            amount="integer: Amount to convert",
            source="string: Currency to convert from",
            target="string: Currency to convert to",
        ),
        (
            "Convert {amount} {source} to {target}.",
            "How much is {amount} {source} in {target}?",
        ),
        "{amount} {source} is {result_amount} {target}.",
    ),
    "create_event": (
        tool(
            "create_event",
            "Add an event to the calendar.",
            title="string: Title of the event",
            day="string: Day of the week",
        ),
        (
            "Add {title} to my calendar on {day}.",
            "Create an event named {title} on {day}.",
            "Put {title} on {day} in my calendar.",
        ),
        "I added {title} on {day}.",
    ),
    "switch_light": (
        tool(
            "switch_light",
            "Switch a light on or off.",
            room="string: Name of the room",
            state="string: on or off",
        ),
        (
            "Turn {state} the light in the {room}.",
            "Switch the {room} light {state}.",
            "Light {state} in the {room}, please.",
        ),
        "The light in the {room} is {state}.",
    ),
    "find_order": (
        tool("find_order", "Find an order by its number.", order="string: Number of the order"),
        (
            "Where is my order {order}?",
            "Find order {order}.",
            "What is the state of order {order}?",
        ),
        "Order {order} is {result_state}.",
    ),
    "play_song": (
        tool(
            "play_song",
            "Play a song.",
            title="string: Title of the song",
            artist="string: Name of the artist",
        ),
        (
            "Play {title} by {artist}.",
            "I want to hear {title} by {artist}.",
        ),
        "Now playing {title} by {artist}.",
    ),
}


TOOL_VERBS = split(
    "open close start stop read move check update book rent paint clean list print pack sell"
)


TOOL_FIELDS = split(
    "name size color place owner count price level key label target unit speed code date"
)


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ROOMS = ("kitchen", "bedroom", "garden", "hall", "office", "bathroom", "cellar", "garage")
CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD", "AUD", "INR")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear")
ORDER_STATES = ("shipped", "packed", "delayed", "delivered", "waiting")
JOBS = ("teacher", "writer", "pilot", "farmer", "dancer", "baker", "sailor", "engineer", "nurse")
