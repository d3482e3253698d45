"""The look of the HTML report: page.css and page.js, put into every page."""
