// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Header from "../../src/mail/Header.ts"
import * as Expression from "../../src/pipeline/Expression.ts"
import * as Syntax from "../../src/pipeline/ExpressionSyntax.ts"
import type * as Stage from "../../src/pipeline/Stage.ts"

const die = Effect.die(new Error("not loaded"))
const message = (more: Partial<Stage.Metadata> = {}): Stage.Metadata => ({
  id: 1,
  rev: 0,
  token: "0f3a",
  sender: "Sender@Example.org",
  section: "route",
  state: {},
  recipients: ["ann+news@ours.example"],
  fromHeader: "a@EU.Example.COM",
  subject: "Hello",
  sizeBytes: 2048,
  hdrFlags: null,
  messageId: null,
  listId: null,
  settings: {},
  attempts: 0,
  receivedAt: DateTime.makeUnsafe(0),
  repeat: false,
  needHeaders: die,
  needPrefix: () => die,
  needBody: die,
  ...more
})

interface Given extends Partial<Stage.Metadata> {
  readonly headerText?: string
  readonly recipient?: string
  readonly nowMillis?: number
  readonly ours?: ReadonlyArray<string>
}

const facts = ({ headerText, nowMillis, ours, ...more }: Given): Expression.Facts => ({
  mail: message(more),
  header: headerText === undefined ? undefined : Header.fromText(headerText),
  nowMillis: nowMillis ?? 0,
  isLocal: (address) => ours?.includes(address) ?? false
})

const tree = (text: string): Syntax.Node =>
  Result.getOrThrowWith(Syntax.parse(text), (why) => new Error(`${text}: ${why}`))
const holds = (text: string, given: Given = {}): boolean =>
  Expression.holds(Expression.compile(tree(text)), facts(given), given.recipient ?? null)
const error = (text: string): string => {
  const parsed = Syntax.parse(text)
  return Result.isFailure(parsed) ? parsed.failure : "no error"
}

/** A table of expressions that hold and of those that do not. */
const table = (given: Given, yes: ReadonlyArray<string>, no: ReadonlyArray<string>): void => {
  for (const text of yes) assert.isTrue(holds(text, given), `${text} holds`)
  for (const text of no) assert.isFalse(holds(text, given), `${text} does not hold`)
}

describe("the values of an expression", () => {
  it("sizes are octets, durations are seconds", () => {
    table(
      { sizeBytes: 1_048_577, nowMillis: 180_001 },
      [
        "size > 1M",
        "size == 1048577",
        "1K == 1024",
        "1G == 1073741824",
        "age > 3m",
        "2d == 48h",
        "0.75 < 1"
      ],
      ["size < 1M", "age > 4h", "size == 1M"]
    )
  })

  it("the envelope and the From address come in parts", () => {
    const recipients = ["ann+news@ours.example", "b@x.example"]
    table(
      { recipient: "ann+news@ours.example", recipients },
      [
        "rcpt.local == 'ann+news'",
        "rcpt.base == 'ann'",
        "rcpt.detail == 'news'",
        "rcpt.domain == 'OURS.example'",
        "mail_from.local == 'Sender'",
        "mail_from.domain == 'example.ORG'",
        "from.domain == 'eu.example.com'",
        "recipients == 2",
        "count(recipients) == 2",
        "stage == 'route'",
        "attempts == 0",
        "subject == 'Hello'"
      ],
      ["rcpt.base == 'Ann'", "recipients > 2", "subject == 'hello'"]
    )
    table(
      { sender: "", recipient: "bob@x.example" },
      ["mail_from == ''", "mail_from.domain == null", "rcpt.detail == null", "rcpt.base == 'bob'"],
      ["mail_from.local == ''", "mail_from"]
    )
  })

  it("addresses and domains compare without regard to case, other strings exactly", () => {
    table(
      {},
      [
        "mail_from == 'sENDER@example.ORG'",
        "mail_from != 'x@example.org'",
        "domain('a@B.example') == 'b.EXAMPLE'",
        "mail_from ~= '*@EXAMPLE.org'",
        "mail_from ends '@example.ORG'"
      ],
      ["'A' == 'a'", "subject == 'HELLO'", "subject ~= 'h*'"]
    )
  })

  it("R47: a domain in U-labels equals its A-labels", () => {
    table(
      { fromHeader: "info@exämple.org", sender: "info@xn--exmple-cua.org" },
      [
        "from.domain == 'xn--exmple-cua.org'",
        "mail_from.domain == 'EXÄMPLE.org'",
        "from.domain in ['.org']",
        "from == 'info@xn--exmple-cua.org'"
      ],
      ["from.domain == 'example.org'"]
    )
  })

  it("A-IF-6 a list entry with a dot in front holds what is below it", () => {
    table(
      {},
      [
        "from.domain in ['.example.com']",
        "from.domain in ['x', 'EU.example.com']",
        "mail_from in ['sender@example.org']"
      ],
      [
        "from.domain in ['example.com']",
        "from.domain in ['.eu.example.com']",
        "'a.example.com' in ['.example.com']",
        "from.domain in []",
        "from.domain in 'eu.example.com'"
      ]
    )
  })

  it("the state is read by its keys and never by what objects inherit", () => {
    const state = { auth: { spf: "pass" }, a: { "b c": [1, 2] }, spam: false } as never
    table(
      { state },
      [
        "state.auth.spf == 'pass'",
        'state.a["b c"]',
        "2 in state.a['b c']",
        "count(state.a['b c']) == 2",
        "state.spam == false",
        "state.auth.dmarc == null",
        "exists(state.auth)",
        "not exists(state.x.y.z)",
        "state.constructor == null",
        "state.__proto__ == null",
        "state.auth.spf.length == null"
      ],
      ["state.spam", "state.spam == null", "state.auth == 'pass'", "state.auth == state.auth"]
    )
  })

  it("settings are those of the recipient, or of the only one", () => {
    const settings = { "ann+news@ours.example": { lang: ["de"] }, "b@x.example": { lang: ["fr"] } }
    table({ settings }, ["'de' in setting('lang')"], ["setting('other')"])
    const recipients = ["ann+news@ours.example", "b@x.example"]
    table({ settings, recipients }, ["setting('lang') == null"], ["'de' in setting('lang')"])
    table(
      { settings, recipients, recipient: "b@x.example" },
      ["'fr' in setting('lang')"],
      ["'de' in setting('lang')"]
    )
  })

  it("header values are unfolded and decoded", () => {
    const headerText =
      "Subject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\r\n aus Bonn\r\n" +
      "Received: by a\r\nRECEIVED: by b\r\n"
    table(
      { headerText },
      [
        "header('subject') == 'Grüße aus Bonn'",
        "count(headers('Received')) == 2",
        "headers_size == 81",
        "any(headers('received'), ends, 'b')",
        "header('X') == null",
        "headers('X') == null or count(headers('X')) == 0"
      ],
      ["any(headers('received'), ==, 'c')", "headers('X')"]
    )
  })

  it("functions", () => {
    table(
      {
        nowMillis: 13.5 * 3_600_000,
        ours: ["Sender@Example.org"],
        state: { client: { ip: "10.1.2.3" } } as never
      },
      [
        "is_local(mail_from)",
        "now_hour() == 13",
        "lower('ÄB') == 'äb'",
        "len('añ😀') == 3",
        "in_net(client_ip, '10.0.0.0/8')",
        "in_net('2001:db8::7', '10.0.0.0/8', '2001:db8::/32')",
        "in_net('::ffff:10.9.9.9', '10.0.0.0/8')",
        "random(token) < 100",
        "random(token) == random('0f3a')",
        "any(recipients, ~=, '*@ours.example')"
      ],
      [
        "is_local(from)",
        "is_local(rcpt)",
        "in_net('x', '10.0.0.0/8')",
        "in_net(client_ip, '192.0.2.1')",
        "domain('x') == ''"
      ]
    )
  })

  it("random() spreads tokens evenly", () => {
    const rollout = Expression.compile(tree("random(token) < 20"))
    const chosen = Array.from({ length: 2000 }, (_, i) =>
      Expression.holds(rollout, facts({ token: `t${i}` }), null)
    )
    const share = chosen.filter(Boolean).length / chosen.length
    assert.isTrue(share > 0.17 && share < 0.23, String(share))
  })
})

describe("null and truth", () => {
  it("A-IF-3 what is missing is null: equal to null and to nothing else", () => {
    table(
      {},
      [
        "not (state.spam == true)",
        "not null",
        "state.spam == null",
        "null == state.spam",
        "subject != null",
        "null == null"
      ],
      [
        "state.spam == true",
        "state.spam == false",
        "state.spam != true",
        "state.x == state.y",
        "state.x != state.y",
        "size != null and null",
        "state.x < 1",
        "state.x >= 0",
        "state.x =~ ''",
        "state.x !~ 'a'",
        "state.x in [null]",
        "subject == state.x"
      ]
    )
  })

  it("types that do not fit are null, never an error", () => {
    table(
      {},
      ["not ('1' == 1)", "(1 == '1') == null"],
      [
        "'1' == 1",
        "'1' != 1",
        "size < 'x'",
        "'b' > 'a'",
        "size =~ '1'",
        "size contains 1",
        "len(1)",
        "lower(1)",
        "any(1, ==, 1)",
        "[1] == [1]",
        "in_net(1, '10.0.0.1')",
        "count('x')",
        "random(1)"
      ]
    )
  })

  it("null, false, the empty string, 0 and the empty list are false", () => {
    table(
      {},
      ["1", "'0'", "[0]", "true", "size and subject"],
      ["null", "false", "''", "0", "[]", "true and ''", "0 or []"]
    )
  })

  it("and binds before or, not before both", () => {
    table(
      {},
      ["true or true and false", "not false and true", "not false or true", "(not true) or true"],
      ["not (true or false)", "(true or true) and false", "not true or false"]
    )
  })
})

describe("patterns", () => {
  it("=~ searches, !~ is its opposite, ~= takes the whole string", () => {
    table(
      {},
      [
        "'abc' =~ 'b'",
        "'abc' =~ '^abc$'",
        "'abc' !~ 'd'",
        "'a\\nb' ~= 'a*b'",
        "'a.b' ~= 'a.b'",
        "'a😀b' ~= 'a?b'",
        "'(a' ~= '(?'",
        "'ABC' =~ '(?i)b'"
      ],
      ["'abc' =~ 'd'", "'abc' !~ 'b'", "'abc' ~= 'b'", "'axb' ~= 'a.b'", "'ab' ~= 'a?b'"]
    )
  })

  it("A-IF-4 a header that is absent matches nothing", () => {
    const condition = Expression.compile(tree('header("List-Id") =~ "<x\\\\.ours>"'))
    assert.isTrue(condition.needsHeaders)
    assert.isFalse(Expression.holds(condition, facts({ headerText: "A: b\r\n" }), null))
    const listed = facts({ headerText: "List-ID: The x list\r\n <x.ours>\r\n" })
    assert.isTrue(Expression.holds(condition, listed, null))
    const other = facts({ headerText: "List-ID: <xyours>\r\n" })
    assert.isFalse(Expression.holds(condition, other, null))
    assert.isFalse(Expression.compile(tree("subject =~ 'x'")).needsHeaders)
  })

  it("A-IF-5 a pattern that makes others hang is done in linear time", () => {
    const condition = Expression.compile(tree("subject =~ '(a+)+$'"))
    const given = facts({ subject: "a".repeat(60 * 1024) + "b" })
    Expression.holds(condition, given, null)
    const before = performance.now()
    const { exhausted, sections } = Expression.decide(
      { rules: [{ condition, section: "yes" }], otherwise: "no" },
      given,
      [null]
    )
    const millis = performance.now() - before
    assert.deepStrictEqual([sections, exhausted], [["no"], false])
    assert.isBelow(millis, 50)
  })

  it("a pattern that costs more than the steps sends the message to ELSE, and says so", () => {
    const text = "not (subject =~ '(a[ab]{200}|b[ab]{200})c') => yes"
    const rules = [Result.getOrThrow(Expression.rule(text))]
    const decide = (subject: string) =>
      Expression.decide({ rules, otherwise: "else" }, facts({ subject }), ["a@x", "b@x"])
    const large = decide("ab".repeat(32_768))
    assert.deepStrictEqual(large, { sections: ["else", "else"], exhausted: true })
    const small = decide("ab")
    assert.deepStrictEqual(small, { sections: ["yes", "yes"], exhausted: false })
  })

  it("R13: a thousand recipients and a huge header are judged in a moment", () => {
    const headerText =
      `To: ${"a@example.org,".repeat(100_000)}\r\n` + "Received: x\r\n".repeat(5000)
    const rules = [
      "any(headers('Received'), contains, 'nowhere') => a",
      "header('To') =~ '(a+@)+$' => b",
      "rcpt == 'x' and header('To') contains 'nobody' => c"
    ].map((text) => Result.getOrThrow(Expression.rule(text)))
    const recipients = Array.from({ length: 1000 }, (_, i) => `u${i}@example.org`)
    const given = facts({ headerText, recipients })
    const before = performance.now()
    const { exhausted, sections } = Expression.decide({ rules, otherwise: "e" }, given, recipients)
    assert.isBelow(performance.now() - before, 1000)
    assert.strictEqual(sections.length, 1000)
    assert.deepStrictEqual([new Set(sections), exhausted], [new Set(["e"]), true])
  })

  it("many recipients share the steps of ten, so that their number makes no bomb", () => {
    const headerText = "D: xn--e1afmkfd.example\r\n".repeat(900)
    const rules = [Result.getOrThrow(Expression.rule("any(headers('D'), ==, rcpt) => a"))]
    const judge = (count: number) => {
      const recipients = Array.from({ length: count }, (_, i) => `u${i}@\u00e4.example`)
      const given = facts({ headerText, recipients })
      return Expression.decide({ rules, otherwise: "e" }, given, recipients).exhausted
    }
    assert.deepStrictEqual([judge(1), judge(10), judge(1000)], [false, false, true])
  })

  it("R13: what is the same for all recipients is worked out once", () => {
    const given = facts({ headerText: `To: ${"ab@".repeat(20_000)}\r\n` })
    const rules = [
      Result.getOrThrow(
        Expression.rule("rcpt == 'u7@example.org' or not (header('To') =~ '([ab]+@)+$') => a")
      )
    ]
    const recipients = Array.from({ length: 1000 }, (_, i) => `u${i}@example.org`)
    const before = performance.now()
    const { exhausted, sections } = Expression.decide({ rules, otherwise: "e" }, given, recipients)
    assert.isBelow(performance.now() - before, 500)
    assert.isFalse(exhausted)
    assert.deepStrictEqual(
      sections.flatMap((section, i) => (section === "a" ? [i] : [])),
      [7]
    )
  })
})

/** The section of a rule, or why it is none. */
const rule = (text: string): string =>
  Result.match(Expression.rule(text), { onSuccess: (r) => r.section, onFailure: (e) => e })

describe("errors name the column and what was expected", () => {
  it("each kind of error", () => {
    const cases: ReadonlyArray<readonly [string, RegExp]> = [
      ["", /^column 1: expected a value, found the end$/],
      ["size > ", /^column 8: expected a value, found the end$/],
      ["size >> 1", /^column 7: expected a value, found >$/],
      ["size > 1 2", /^column 10: expected an operator, and, or, or the end, found 2$/],
      ["siez > 1", /^column 1: expected a value; siez is none of state\.KEY, size, /],
      ["1 == is_lcal(rcpt)", /^column 6: expected a function; is_lcal is none of any, is_local, /],
      ["is_list(rcpt)", /^column 1: expected a function/],
      ["is_local('a@b')", /^column 1: expected rcpt, mail_from or from as argument of is_local$/],
      ["in_net(client_ip)", /^column 1: expected 2 to 51 arguments for in_net$/],
      ["in_net(client_ip, '10.0.0.0/33')", /^column 1: expected a network in quotes/],
      ["header('a b')", /^column 1: expected the name of a header field in quotes/],
      ["header(subject)", /^column 1: expected the name of a header field in quotes/],
      ["subject =~ '('", /^column 12: expected a regular expression \(RE2\): .*missing closing/],
      ["subject =~ rcpt", /^column 12: expected a pattern in quotes of at most 256 characters$/],
      ["subject =~ '(a{100}){100}'", /^column 12: expected a regular expression/],
      [
        "subject =~ '[ab]{999}c{99}'",
        /^column 12: expected a regular expression \(RE2\): this one is too large$/
      ],
      [
        `subject ~= '${"a".repeat(257)}'`,
        /^column 12: expected a pattern in quotes of at most 256/
      ],
      ["'abc", /^column 1: expected the quote that ends this string$/],
      ["'a\\.b'", /^column 3: expected one of \\\\ \\" \\' \\n \\t \\xHH$/],
      ["3x", /^column 1: expected a number, or a whole number with one of K M G s m h d$/],
      ["1.5K", /^column 1: expected a number/],
      ["999999999999999G", /^column 1: expected a number below/],
      ["size = 1", /^column 6: expected a value or an operator$/],
      ["state", /^column 6: expected \.KEY behind state, found the end$/],
      ["state.", /^column 7: expected a key, found the end$/],
      ["state[a]", /^column 7: expected a key in quotes, found a$/],
      ["any(recipients, 1)", /^column 17: expected one of == /],
      ["(size", /^column 6: expected an operator, and, or, or \), found the end$/],
      ["[1 2]", /^column 4: expected , or \], found 2$/],
      ["not not true", /^column 5: expected a value; not is none of/],
      [
        "(".repeat(33) + "1" + ")".repeat(33),
        /^column 33: expected at most 32 brackets in one another/
      ],
      [Array.from({ length: 201 }, () => "1").join(" or "), /expected at most 200 parts/],
      [`'${"x".repeat(5000)}'`, /^expected at most 4096 octets$/]
    ]
    for (const [text, wanted] of cases) assert.match(error(text), wanted, text.slice(0, 60))
  })

  it("a rule ends with a section", () => {
    assert.strictEqual(rule("'=>' == subject =>  block-language "), "block-language")
    assert.strictEqual(
      rule("size > 1"),
      "column 9: expected an operator, and, or, or => and a section, found the end"
    )
    assert.strictEqual(
      rule("size > 1 => a b"),
      "column 12: expected the name of a stage section behind =>"
    )
    assert.strictEqual(rule("=> x"), "column 1: expected a value, found =>")
  })
})

/** A tree from a list of choices: every list gives one, and every tree has a list. */
const grow = (choices: ReadonlyArray<number>): Syntax.Node => {
  let at = 0
  const pick = (n: number): number => (choices[at++] ?? 0) % n
  const of = <A>(...options: ReadonlyArray<A>): A => options[pick(options.length)]!
  const text = (): string => of("", "a@x.example", "\"q\\ \n\t\x01\u0085é😀'", "=>", "10.0.0.1")
  const literal = (): Syntax.Node => ({
    _tag: "Literal",
    value: of<string | number | boolean | null>(text(), pick(9999), 0.75, true, false, null)
  })
  const path = (): Syntax.Node => ({
    _tag: "Path",
    name: of("size", "rcpt", "from.domain", "recipients", "subject", "mail_from")
  })
  const op = (): Syntax.Operator =>
    of("==", "!=", "<", "<=", ">", ">=", "in", "contains", "starts", "ends")
  const fixedCall = (): Syntax.Node =>
    of<Syntax.Node>(
      { _tag: "Call", name: "header", args: [{ _tag: "Literal", value: "To" }] },
      { _tag: "Call", name: "is_local", args: [{ _tag: "Path", name: "rcpt" }] },
      { _tag: "Call", name: "now_hour", args: [] }
    )
  const more = (depth: number): ReadonlyArray<Syntax.Node> => (pick(2) === 0 ? [] : [value(depth)])
  const value = (depth: number): Syntax.Node => {
    switch (pick(depth > 3 ? 3 : 8)) {
      case 0:
        return literal()
      case 1:
        return path()
      case 2:
        return { _tag: "State", keys: of([of("spam", "a b", "auth")], ["auth", 'x"y']) }
      case 3:
        return { _tag: "List", items: Array.from({ length: pick(4) }, () => value(depth + 1)) }
      case 4:
        return {
          _tag: "Call",
          name: of("lower", "len", "exists", "count", "domain", "random"),
          args: [value(depth + 1)]
        }
      case 5:
        return { _tag: "Any", list: value(depth + 1), op: op(), value: value(depth + 1) }
      case 6:
        return fixedCall()
      default:
        return whole(depth + 1)
    }
  }
  const whole = (depth: number): Syntax.Node => {
    switch (pick(depth > 3 ? 1 : 6)) {
      case 0:
        return value(depth)
      case 1:
        return { _tag: "Not", of: value(depth + 1) }
      case 2:
        return { _tag: "And", all: [value(depth + 1), value(depth + 1), ...more(depth + 1)] }
      case 3:
        return { _tag: "Or", all: [value(depth + 1), value(depth + 1)] }
      case 4:
        return {
          _tag: "Compare",
          op: of("=~", "!~", "~="),
          left: value(depth + 1),
          right: { _tag: "Literal", value: of("a*", "^x", "[a-c]+@") }
        }
      default:
        return { _tag: "Compare", op: op(), left: value(depth + 1), right: value(depth + 1) }
    }
  }
  return whole(0)
}

const Choice = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 9999 }))
const Choices = Schema.Array(Choice).check(Schema.isMaxLength(60))
const someMail: Given = {
  headerText: "To: a@x.example\r\n",
  ours: ["a@x.example"],
  recipient: "a@x.example",
  recipients: ["a@x.example", "b@y.example"],
  state: { spam: false, "a b": ["x", 1], auth: { 'x"y': "z" } } as never
}

describe("laws", () => {
  it.prop(
    "printed and parsed again it is the same",
    { choices: Choices },
    ({ choices }) => {
      const grown = grow(choices)
      assert.deepStrictEqual(tree(Syntax.print(grown)), grown)
    },
    { arbitrary: { runs: 500 } }
  )

  it.prop(
    "evaluating never fails",
    { choices: Choices },
    ({ choices }) => {
      const condition = Expression.compile(tree(Syntax.print(grow(choices))))
      for (const given of [{}, someMail]) {
        assert.isBoolean(Expression.holds(condition, facts(given), null))
        assert.isBoolean(Expression.holds(condition, facts(given), "a@x.example"))
      }
    },
    { arbitrary: { runs: 500 } }
  )

  it.prop(
    "not (a and b) is (not a) or (not b)",
    { a: Choices, b: Choices },
    ({ a, b }) => {
      const [x, y] = [Syntax.print(grow(a)), Syntax.print(grow(b))]
      assert.strictEqual(
        holds(`not ((${x}) and (${y}))`, someMail),
        holds(`(not (${x})) or (not (${y}))`, someMail)
      )
    },
    { arbitrary: { runs: 300 } }
  )

  it.prop(
    "all recipients are judged as each alone",
    { choices: Choices },
    ({ choices }) => {
      const rules = [{ condition: Expression.compile(grow(choices)), section: "yes" }]
      const sections = (recipients: ReadonlyArray<string>) =>
        Expression.decide({ rules, otherwise: "no" }, facts(someMail), recipients).sections
      const all = ["a@x.example", "b@y.example", "a@x.example"]
      assert.deepStrictEqual(
        sections(all),
        all.flatMap((one) => sections([one]))
      )
    },
    { arbitrary: { runs: 300 } }
  )

  it.prop(
    "the parser takes any text",
    { text: Schema.String },
    ({ text }) => {
      assert.isString(error(text))
    },
    { arbitrary: { runs: 500 } }
  )

  const words = [
    "(",
    ")",
    "[",
    "]",
    ",",
    ".",
    "=>",
    "==",
    "in",
    "not",
    "and",
    "or",
    "any(",
    "state",
    "size",
    "'a'",
    "1",
    "3m",
    "=~",
    "\\",
    '"',
    "é"
  ]
  it.prop(
    "the parser takes any row of its words",
    { choices: Choices },
    ({ choices }) => {
      const text = choices.map((n) => words[n % words.length]).join(" ")
      const parsed = Syntax.parse(text)
      if (Result.isFailure(parsed)) assert.match(parsed.failure, /^column \d+: expected /)
      else assert.deepStrictEqual(tree(Syntax.print(parsed.success)), parsed.success)
    },
    { arbitrary: { runs: 1000 } }
  )
})
