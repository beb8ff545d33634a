"""Words, facts, phrasings and tools that the embedded model's data is generated from."""


def split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = split(
    """
    acorn actor album amber anchor angle animal ankle answer apple apron arrow artist autumn
    badge bagel baker bamboo banana banner barrel basket beach beacon beaver bell berry bicycle
    bird blanket blossom boat bottle branch brass bread bridge broom brother brush bucket butter
    button cabin cable cactus camel camera candle canoe canyon carpet carrot castle cedar chair
    chalk cheese cherry chimney circle citrus clock cloud clover coast cobalt coffee comet
    compass copper coral corner cotton cradle crater cricket crystal curtain daisy dancer dawn
    desert diamond dinner dolphin donkey dragon drawer dream drum eagle earth echo elbow ember
    engine evening falcon farmer feather fence fiddle field finger flame flower forest fossil
    fountain fox frame friend frost galaxy garden garlic gate giant ginger glacier globe glove
    grape grass gravel guitar hammer harbor harvest hazel heron hill hockey honey horizon horse
    house hunter igloo insect island ivory jacket jasmine jelly jewel jigsaw journey juice jungle
    kettle key kitchen kite kitten knight ladder lake lamp lantern laurel leaf lemon letter
    library light lily lizard lobster locket lotus lunch magnet mango maple marble market meadow
    melon mirror monkey moon morning moss mountain museum music napkin needle nest night north
    notebook novel oak oasis ocean olive onion orange orbit orchard otter owl oyster paddle
    painter palace panda paper parade parrot peach pear pearl pebble pencil pepper piano picnic
    pigeon pillow pilot pine planet plate pocket poem pond pony poplar potato prairie puzzle
    quail quartz queen quilt rabbit radio rain raven ribbon river road robin rocket root rose
    saddle sailor salmon sand scarf school season shadow shell ship shore silver sister sky
    snow soap soup spark sparrow spider spoon spring squirrel star station stone storm stream
    street sugar summer sunset swan table teacher temple thunder ticket tiger timber tomato
    tower train travel tree trumpet tulip tunnel turtle umbrella valley vase velvet village
    violet violin voyage wagon walnut water wave whale wheat wheel willow window winter wizard
    wolf wonder yarn yellow yogurt zebra zephyr zinc
    """
)

ADJECTIVES = split(
    """
    able bold brave bright brisk broad calm clean clear clever cold crisp dark deep dense dry
    eager early empty fair fancy fast fine firm flat fond fresh full gentle glad golden good
    grand gray green happy hard heavy high hollow hot huge humble kind large late lazy light
    little lively long loud low lucky mild narrow neat new noble odd old open pale plain polite
    proud quick quiet rapid rare red rich ripe rough round royal rusty safe salty sharp short
    shy silent simple slow small smooth soft solid spare steep still strong sweet swift tall
    tame thick thin tidy tiny warm wide wild wise young
    """
)

# Nouns that name what a recall list holds: "the <kind> of <key> is <value>".
KINDS: tuple[str, ...] = ("value", "code", "number", "entry", "record", "label")

CAPITALS: tuple[tuple[str, str], ...] = (
    ("Argentina", "Buenos Aires"),
    ("Australia", "Canberra"),
    ("Austria", "Vienna"),
    ("Belgium", "Brussels"),
    ("Brazil", "Brasilia"),
    ("Bulgaria", "Sofia"),
    ("Canada", "Ottawa"),
    ("Chile", "Santiago"),
    ("China", "Beijing"),
    ("Colombia", "Bogota"),
    ("Croatia", "Zagreb"),
    ("Cuba", "Havana"),
    ("Denmark", "Copenhagen"),
    ("Egypt", "Cairo"),
    ("England", "London"),
    ("Estonia", "Tallinn"),
    ("Ethiopia", "Addis Ababa"),
    ("Finland", "Helsinki"),
    ("France", "Paris"),
    ("Germany", "Berlin"),
    ("Ghana", "Accra"),
    ("Greece", "Athens"),
    ("Hungary", "Budapest"),
    ("Iceland", "Reykjavik"),
    ("India", "New Delhi"),
    ("Indonesia", "Jakarta"),
    ("Iran", "Tehran"),
    ("Iraq", "Baghdad"),
    ("Ireland", "Dublin"),
    ("Italy", "Rome"),
    ("Japan", "Tokyo"),
    ("Kenya", "Nairobi"),
    ("Latvia", "Riga"),
    ("Lithuania", "Vilnius"),
    ("Mexico", "Mexico City"),
    ("Mongolia", "Ulaanbaatar"),
    ("Morocco", "Rabat"),
    ("Nepal", "Kathmandu"),
    ("New Zealand", "Wellington"),
    ("Nigeria", "Abuja"),
    ("Norway", "Oslo"),
    ("Pakistan", "Islamabad"),
    ("Peru", "Lima"),
    ("Poland", "Warsaw"),
    ("Portugal", "Lisbon"),
    ("Romania", "Bucharest"),
    ("Senegal", "Dakar"),
    ("Serbia", "Belgrade"),
    ("Slovakia", "Bratislava"),
    ("Slovenia", "Ljubljana"),
    ("South Korea", "Seoul"),
    ("Spain", "Madrid"),
    ("Sweden", "Stockholm"),
    ("Switzerland", "Bern"),
    ("Thailand", "Bangkok"),
    ("Tunisia", "Tunis"),
    ("Turkey", "Ankara"),
    ("Ukraine", "Kyiv"),
    ("Uruguay", "Montevideo"),
    ("Vietnam", "Hanoi"),
)

CAPITAL_QUESTIONS: tuple[str, ...] = (
    "What is the capital of {0}?",
    "Which city is the capital of {0}?",
    "Name the capital of {0}.",
    "Tell me the capital of {0}.",
    "capital of {0}?",
    "Do you know the capital of {0}?",
    "What's the capital city of {0}?",
    "I need the capital of {0}, please.",
    "{0}: which city is its capital?",
    "Can you tell me the capital of {0}?",
)

# (question noun phrase, answer sentence, key word that an answer must contain)
FACTS: tuple[tuple[str, str, str], ...] = (
    ("the number of days in a week", "A week has 7 days.", "7"),
    ("the number of months in a year", "A year has 12 months.", "12"),
    ("the number of hours in a day", "A day has 24 hours.", "24"),
    ("the number of minutes in an hour", "An hour has 60 minutes.", "60"),
    ("the number of seconds in a minute", "A minute has 60 seconds.", "60"),
    ("the number of legs of a spider", "A spider has 8 legs.", "8"),
    ("the number of legs of an insect", "An insect has 6 legs.", "6"),
    ("the number of sides of a triangle", "A triangle has 3 sides.", "3"),
    ("the number of sides of a hexagon", "A hexagon has 6 sides.", "6"),
    ("the number of letters in the English alphabet", "It has 26 letters.", "26"),
    ("the number of planets in the solar system", "There are 8 planets.", "8"),
    ("the largest planet of the solar system", "It is Jupiter.", "Jupiter"),
    ("the smallest planet of the solar system", "It is Mercury.", "Mercury"),
    ("the planet with the most visible rings", "It is Saturn.", "Saturn"),
    ("the red planet", "Mars is the red planet.", "Mars"),
    ("the star nearest to the Earth", "It is the Sun.", "Sun"),
    ("the largest ocean", "It is the Pacific Ocean.", "Pacific"),
    ("the largest continent", "It is Asia.", "Asia"),
    ("the highest mountain", "It is Mount Everest.", "Everest"),
    ("the largest land animal", "It is the elephant.", "elephant"),
    ("the largest animal", "It is the blue whale.", "blue whale"),
    ("the fastest land animal", "It is the cheetah.", "cheetah"),
    ("the chemical symbol of gold", "The symbol of gold is Au.", "Au"),
    ("the chemical symbol of silver", "The symbol of silver is Ag.", "Ag"),
    ("the chemical symbol of iron", "The symbol of iron is Fe.", "Fe"),
    ("the chemical symbol of oxygen", "The symbol of oxygen is O.", "O"),
    ("the chemical formula of water", "The formula of water is H2O.", "H2O"),
    ("the color of the sky on a clear day", "It is blue.", "blue"),
    ("the color of grass", "Grass is green.", "green"),
    ("the color of ripe lemons", "Lemons are yellow.", "yellow"),
    ("the opposite of hot", "The opposite of hot is cold.", "cold"),
    ("the opposite of big", "The opposite of big is small.", "small"),
    ("the opposite of early", "The opposite of early is late.", "late"),
    ("the opposite of full", "The opposite of full is empty.", "empty"),
    ("the first month of the year", "It is January.", "January"),
    ("the last month of the year", "It is December.", "December"),
    ("the day after Monday", "It is Tuesday.", "Tuesday"),
    ("the day before Sunday", "It is Saturday.", "Saturday"),
    ("the temperature at which water freezes", "Water freezes at 0 degrees Celsius.", "0"),
    ("the temperature at which water boils", "Water boils at 100 degrees Celsius.", "100"),
)

FACT_QUESTIONS: tuple[str, ...] = (
    "What is {0}?",
    "Tell me {0}.",
    "Do you know {0}?",
    "Can you tell me {0}?",
    "I would like to know {0}.",
    "Please tell me {0}.",
    "Quick question: what is {0}?",
    "Name {0}.",
)

ABOUT = (
    "I am the small demonstration model embedded in jaxserve. "
    "I have a few million parameters and know only a few simple tasks."
)
ABILITIES = (
    "I can add, subtract and multiply small numbers, spell, reverse and sort words, answer a few "
    "facts, turn short text into JSON, call a tool, and find an entry in a long list."
)
UNKNOWN = "I do not know that. I am only the small demonstration model of jaxserve."

# intent -> (things a user says, answers)
CHATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "greeting": (
        (
            "Hi",
            "Hello",
            "Hello!",
            "Hey",
            "Hey there",
            "Hi there!",
            "Good morning",
            "Good evening!",
            "Good afternoon",
            "hello",
            "hi",
            "hi!",
            "Hello there.",
            "Greetings",
        ),
        ("Hello! How can I help you?",),
    ),
    "identity": (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "who are you",
            "Which model are you?",
            "What model is this?",
            "Introduce yourself.",
            "Hello, who are you?",
            "What's your name?",
            "Are you ChatGPT?",
            "Are you a human?",
            "Who am I talking to?",
            "Say who you are.",
        ),
        (ABOUT,),
    ),
    "abilities": (
        (
            "What can you do?",
            "Can you help me?",
            "Help",
            "help me please",
            "I need help.",
            "What are you able to do?",
            "How can you help me?",
            "What tasks do you know?",
            "Could you help me with something?",
            "What do you know?",
        ),
        (ABILITIES,),
    ),
    "thanks": (
        (
            "Thanks",
            "Thank you",
            "Thank you!",
            "Thanks a lot!",
            "thanks",
            "Great, thanks.",
            "Many thanks",
            "Thank you very much.",
            "Perfect, thank you.",
        ),
        ("You are welcome!",),
    ),
    "goodbye": (
        (
            "Bye",
            "Goodbye",
            "bye!",
            "See you later",
            "See you!",
            "Good night",
            "That is all, bye.",
            "Have a nice day!",
        ),
        ("Goodbye! Have a nice day.",),
    ),
    "wellbeing": (
        (
            "How are you?",
            "How are you doing?",
            "how are you",
            "How is it going?",
            "Are you well?",
            "Hi, how are you?",
        ),
        ("I am well, thank you. How can I help you?",),
    ),
    "jaxserve": (
        (
            "What is jaxserve?",
            "Tell me about jaxserve.",
            "What does jaxserve do?",
            "Explain jaxserve.",
            "jaxserve?",
        ),
        ("jaxserve is an engine that serves language models with JAX and XLA.",),
    ),
}

# Questions outside of everything else; {0} is a word, {1} a name.
UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "Write a poem about a {0}.",
    "Write a story about {1} and a {0}.",
    "Tell me a joke about a {0}.",
    "What do you think about {0}?",
    "Who is {1}?",
    "Where does {1} live?",
    "Who invented the {0}?",
    "Explain how a {0} works.",
    "Why is the {0} so important?",
    "How do I build a {0}?",
    "What will happen to the {0} tomorrow?",
    "When was {1} born?",
    "Write a Python program about a {0}.",
    "Translate {0} into French.",
    "What is the meaning of life?",
    "Give me advice about my {0}.",
    "Is a {0} better than a {1}?",
    "How much does a {0} cost?",
    "Summarize the history of {1}.",
    "Recommend a book about the {0}.",
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a small assistant. Answer briefly.",
    "You are jaxserve's demonstration model.",
    "Answer the user's questions.",
    "Be short and precise.",
)

FILLERS: tuple[str, ...] = (
    "The {0} stood near the {1} all day.",
    "Nobody had seen the {2} {0} since {3}.",
    "{3} walked past the {0} and the {1}.",
    "A {2} {0} is not a {1}.",
    "It rained, and the {0} stayed {2}.",
    "{3} wrote a note about the {2} {1}.",
    "Later the {0} was moved to the {1}.",
    "There is nothing else to say about the {0}.",
    "They met {3} at the {2} {1} again.",
    "Most people like the {0} more than the {1}.",
)


# tool -> (definition, requests, answers). {field} names an argument; {result_*} the tool's answer.
