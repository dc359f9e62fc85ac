"""The 16 English tasks of LongBench: wording, answer length, and whether the chat template applies."""

from __future__ import annotations

from dataclasses import dataclass

MULTI_HOP = """Below are numbered passages and a question. Answer the question from the passages with a name or a \
short phrase and nothing else.

{context}

Using only the passages above, answer with a name or a short phrase.

Question: {input}
Answer:"""


@dataclass(frozen=True)
class LongBenchTask:
    """One task: its template holds ``{context}`` and, unless the task has no question, ``{input}``.

    `has_question` is False where what follows the context is no question but more text to continue.
    """

    name: str
    description: str
    max_new_tokens: int
    template: str
    use_chat_template: bool = True
    has_question: bool = True


_TASKS = (
    LongBenchTask(
        "narrativeqa",
        "questions about a whole book or film script",
        128,
        """Read the story below, a book or a film script, and answer the question about it in as few words as \
you can.

{context}

Answer the question about this story in as few words as you can. Do not explain.

Question: {input}
Answer:""",
    ),
    LongBenchTask(
        "qasper",
        "questions about a research paper",
        128,
        """Here is a research paper, followed by a question about it.

{context}

Answer the question from the paper with a short phrase or one sentence. If the paper does not say, write \
"unanswerable". If it is a yes/no question, write "yes", "no" or "unanswerable". Do not explain.

Question: {input}
Answer:""",
    ),
    LongBenchTask(
        "multifieldqa_en",
        "questions about one long document of any field",
        64,
        """Here is a document, followed by a question about it.

{context}

Answer the question from the document, in a few words and without an explanation.

Question: {input}
Answer:""",
    ),
    LongBenchTask("hotpotqa", "questions whose answer needs two of many passages", 32, MULTI_HOP),
    LongBenchTask("2wikimqa", "questions that compare or chain Wikipedia passages", 32, MULTI_HOP),
    LongBenchTask("musique", "questions that take two to four steps over passages", 32, MULTI_HOP),
    LongBenchTask(
        "gov_report",
        "summaries of government reports",
        512,
        """Below is a report by a government agency.

{context}

Summarise the report above on one page.

Summary:""",
    ),
    LongBenchTask(
        "qmsum",
        "questions about a meeting's transcript, answered by a summary",
        512,
        """Below is the transcript of a meeting, followed by a question or an instruction about it.

{context}

Answer in one or a few sentences, from the transcript.

Query: {input}
Answer:""",
    ),
    LongBenchTask(
        "multi_news",
        "one summary of several news articles",
        512,
        """Below are several news articles about the same event.

{context}

Summarise all the articles above in one page of text.

Summary:""",
    ),
    LongBenchTask(
        "trec",
        "the type of a question, from many examples",
        64,
        """Each question below is followed by its type. Give the type of the last one.

{context}
{input}""",
        use_chat_template=False,
    ),
    LongBenchTask(
        "triviaqa",
        "trivia questions about a passage, after some examples",
        32,
        """Each passage below is followed by a question and its answer. Give only the answer to the last one.

{context}

{input}""",
        use_chat_template=False,
    ),
    LongBenchTask(
        "samsum",
        "summaries of chats, after some examples",
        128,
        """Each conversation below is followed by a short summary. Summarise the last one.

{context}

{input}""",
        use_chat_template=False,
    ),
    LongBenchTask(
        "passage_count",
        "how many different paragraphs there are among repeated ones",
        32,
        """Below are numbered paragraphs of Wikipedia, and some of them are there more than once.

{context}

How many different paragraphs are there, when each repeated one counts once? Write one number and nothing else.

Number of different paragraphs:""",
    ),
    LongBenchTask(
        "passage_retrieval_en",
        "which of 30 paragraphs a summary is of",
        32,
        """Below are 30 numbered paragraphs of Wikipedia, and then a summary of one of them.

{context}

Which paragraph is the summary of? Write it as "Paragraph 7", with the right number, and nothing else.

Summary: {input}
Answer:""",
    ),
    LongBenchTask(
        "lcc",
        "the next line of a source file",
        64,
        "Write the next line of this code.\n{context}",
        use_chat_template=False,
        has_question=False,
    ),
    LongBenchTask(
        "repobench-p",
        "the next line of a source file, given others of its repository",
        64,
        "Write the next line of the last file.\n{context}{input}",
        use_chat_template=False,
        has_question=False,
    ),
)

LONGBENCH_TASKS = {task.name: task for task in _TASKS}
